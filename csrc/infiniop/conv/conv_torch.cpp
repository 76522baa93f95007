// torch.ops.infini.conv, functional and out; declared in torch_infini/ops/conv.py.
#include "../../torch/tensor.h"
#include "conv.h"

#include <optional>
#include <vector>

namespace infini::conv {
namespace {

constexpr Checker kRule("conv");

// One number for all spatial dimensions, or one for each.
void copy_parameter(const char *name, int64_t *to, const std::vector<int64_t> &from, int spatial) {
    if (from.size() != 1 && from.size() != static_cast<size_t>(spatial)) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, name, message("have 1 or ", spatial, " values, for the spatial dimensions"),
                   std::to_string(from.size()));
    }
    for (int i = 0; i < spatial; ++i) {
        to[i] = from[from.size() == 1 ? 0 : static_cast<size_t>(i)];
    }
}

// A single image is a batch of one.
void insert_batch(TensorView &image) {
    for (int i = image.ndim++; i > 0; --i) {
        image.shape[i] = image.shape[i - 1];
        image.strides[i] = image.strides[i - 1];
    }
    image.shape[0] = 1;
}

using Ints = std::vector<int64_t>;

// All but the output.
Args conv_args(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Ints &stride,
               const Ints &padding, const Ints &dilation) {
    Args args;
    args.w = view(kRule, "weight", weight);
    kRule.rank("weight", args.w, 3, kMaxDims);
    args.spatial = args.w.ndim - 2;
    copy_parameter("stride", args.strides, stride, args.spatial);
    copy_parameter("padding", args.pads, padding, args.spatial);
    copy_parameter("dilation", args.dilations, dilation, args.spatial);
    args.x = view(kRule, "x", x);
    if (args.x.ndim == args.spatial + 1) {
        insert_batch(args.x);
    }
    if (bias) {
        args.bias = view(kRule, "bias", *bias);
    }
    return args;
}

Tensor run_with(Args args, bool one_image, Tensor out) {
    args.y = view(kRule, "out", out);
    if (one_image) {
        kRule.rank("out", args.y, args.spatial + 1);
        insert_batch(args.y);
    }
    check(args);
    const Tensor workspace = empty({static_cast<int64_t>(workspace_size(args))}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    run(args);
    return out;
}

Tensor conv_out(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Ints &stride,
                const Ints &padding, const Ints &dilation, Tensor out) {
    const Args args = conv_args(x, weight, bias, stride, padding, dilation);
    return run_with(args, x.dim() < args.x.ndim, out);
}

Tensor conv(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Ints &stride,
            const Ints &padding, const Ints &dilation) {
    const Args args = conv_args(x, weight, bias, stride, padding, dilation);
    TensorView y = output_of(args);
    const bool one_image = x.dim() < args.x.ndim;
    if (one_image) {
        --y.ndim;
        for (int i = 0; i < y.ndim; ++i) {
            y.shape[i] = y.shape[i + 1];
        }
    }
    return run_with(args, one_image, empty_like(y));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("conv", INFINI_BOX(conv));
    m.impl("conv.out", INFINI_BOX(conv_out));
}

} // namespace infini::conv
