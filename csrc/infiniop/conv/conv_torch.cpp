// torch.ops.infini.conv, functional and out; declared in torch_infini/ops/conv.py. Calls ATen's convolution (oneDNN)
// where that is faster on this CPU: the table is in gemm/library.h.
#include "../../torch/tensor.h"
#include "conv.h"
#include "gemm/library.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include <torch/csrc/stable/ops.h>

namespace infini::conv {
namespace {

constexpr Checker kRule("conv");

// Copies a parameter that has one value for all spatial dimensions, or one per dimension.
void copy_parameter(const char *name, int64_t *to, const std::vector<int64_t> &from, int spatial) {
    if (from.size() != 1 && from.size() != static_cast<size_t>(spatial)) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, name, message("have 1 or ", spatial, " values, for the spatial dimensions"),
                   std::to_string(from.size()));
    }
    for (int i = 0; i < spatial; ++i) {
        to[i] = from[from.size() == 1 ? 0 : static_cast<size_t>(i)];
    }
}

// Turns a single image into a batch of one.
void insert_batch(TensorView &image) {
    for (int i = image.ndim++; i > 0; --i) {
        image.shape[i] = image.shape[i - 1];
        image.strides[i] = image.strides[i - 1];
    }
    image.shape[0] = 1;
}

using Ints = std::vector<int64_t>;

// The arguments without the output.
Args conv_args(const ExecutionContext &context, const Tensor &x, const Tensor &weight,
               const std::optional<Tensor> &bias, const Ints &stride, const Ints &padding, const Ints &dilation) {
    Args args;
    args.w = view(context, kRule, "weight", weight);
    kRule.rank("weight", args.w, 3, kMaxDims);
    args.spatial = args.w.ndim - 2;
    copy_parameter("stride", args.strides, stride, args.spatial);
    copy_parameter("padding", args.pads, padding, args.spatial);
    copy_parameter("dilation", args.dilations, dilation, args.spatial);
    args.x = view(context, kRule, "x", x);
    if (args.x.ndim == args.spatial + 1) {
        insert_batch(args.x);
    }
    if (bias) {
        args.bias = view(context, kRule, "bias", *bias);
    }
    return args;
}

// Whether ATen computes the product; call after check(). The size compared is the channels of y, or the positions of an
// image if these are fewer.
bool aten_takes(const ExecutionContext &context, const Args &args) {
    if (!context.is_cpu() || args.spatial > 3 || args.y.numel() == 0) {
        return false;
    }
    int64_t positions = 1, depth = args.w.shape[1];
    bool overlap = false;
    for (int i = 0; i < args.spatial; ++i) {
        positions *= args.y.shape[i + 2];
        depth *= args.w.shape[i + 2];
        overlap = overlap || args.strides[i] < args.dilations[i] * (args.w.shape[i + 2] - 1) + 1;
    }
    const int64_t size = std::min(args.w.shape[0], positions);
    const double work = static_cast<double>(args.y.numel()) * static_cast<double>(depth);
    const auto products = overlap ? gemm::Products::kConv : gemm::Products::kPatches;
    return work >= gemm::kMinProducts && gemm::library_takes_size(products, args.x.dtype, size);
}

Ints listed(const int64_t *values, int spatial) {
    return {values, values + spatial};
}

Tensor convolve_by_aten(const ExecutionContext &context, const Args &args) {
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    const Ints none(static_cast<size_t>(args.spatial), 0);
    const bool has_bias = args.bias.dtype != INFINI_DTYPE_INVALID;
    std::array stack{from(tensor_of(context, args.x)),
                     from(tensor_of(context, args.w)),
                     from(has_bias ? std::optional(tensor_of(context, args.bias)) : std::nullopt),
                     from(listed(args.strides, args.spatial)),
                     from(listed(args.pads, args.spatial)),
                     from(listed(args.dilations, args.spatial)),
                     from(false), // transposed
                     from(none),  // output_padding
                     from(int64_t{1})};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::convolution", "", stack.data(), TORCH_ABI_VERSION));
    return to<Tensor>(stack[0]);
}

// is_new: the caller does not hold `out` yet, so ATen's result may be returned instead.
Tensor run_with(const ExecutionContext &context, Args args, bool one_image, Tensor out, bool is_new) {
    args.y = view(context, kRule, "out", out);
    if (one_image) {
        kRule.rank("out", args.y, args.spatial + 1);
        insert_batch(args.y);
    }
    check(args);
    if (aten_takes(context, args)) {
        const Tensor y = convolve_by_aten(context, args);
        if (is_new && !one_image && y.is_contiguous()) {
            return y;
        }
        Tensor to = tensor_of(context, args.y);
        torch::stable::copy_(to, y);
        return out;
    }
    const Tensor workspace = empty(context, {static_cast<int64_t>(workspace_size(context, args))}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    run(context, args);
    return out;
}

Tensor conv_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight,
                const std::optional<Tensor> &bias, const Ints &stride, const Ints &padding, const Ints &dilation,
                Tensor out) {
    const Args args = conv_args(context, x, weight, bias, stride, padding, dilation);
    return run_with(context, args, x.dim() < args.x.ndim, out, false);
}

Tensor conv(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias,
            const Ints &stride, const Ints &padding, const Ints &dilation) {
    const Args args = conv_args(context, x, weight, bias, stride, padding, dilation);
    TensorView y = output_of(args);
    const bool one_image = x.dim() < args.x.ndim;
    if (one_image) {
        --y.ndim;
        for (int i = 0; i < y.ndim; ++i) {
            y.shape[i] = y.shape[i + 1];
        }
    }
    return run_with(context, args, one_image, empty_like(context, y), true);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("conv", INFINI_BOX(conv));
    m.impl("conv.out", INFINI_BOX(conv_out));
}

} // namespace infini::conv
