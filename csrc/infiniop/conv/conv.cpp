// The rules of conv, and its CPU product, computed tile by tile by gemm.
#include "conv.h"

#include "check.h"
#include "gemm/gemm.h"
#include "rearrange/rearrange.h"

namespace infini::conv {

KernelTable<Args> kernels{"conv"};

namespace {

constexpr Checker kRule("conv");

// The bytes of the im2col tile that gemm reads. It should stay in the L2 cache, together with gemm's packed panels.
constexpr int64_t kTileBytes = 512 * 1024;
constexpr int64_t kMinColumns = 256; // so that gemm gets a wide product

// Parameters and kernel sizes below this limit keep every position within int64.
constexpr int64_t kLargest = int64_t{1} << 31;

// Cin * kernel size: the number of products per element of y.
int64_t depth(const Args &args) {
    int64_t product = 1;
    for (int dim = 1; dim < args.w.ndim; ++dim) {
        product *= args.w.shape[dim];
    }
    return product;
}

// The number of output positions per image.
int64_t positions(const Args &args) {
    int64_t product = 1;
    for (int dim = 2; dim < args.y.ndim; ++dim) {
        product *= args.y.shape[dim];
    }
    return product;
}

int64_t tile_columns(const Args &args) {
    const int64_t row_bytes = depth(args) * static_cast<int64_t>(size_of(args.x.dtype)), all = positions(args);
    int64_t columns = row_bytes > 0 ? kTileBytes / row_bytes / 64 * 64 : all;
    columns = columns < kMinColumns ? kMinColumns : columns;
    return columns < all ? columns : all;
}

void check_parameter(const char *name, const int64_t *values, int spatial, int64_t least) {
    for (int i = 0; i < spatial; ++i) {
        if (values[i] < least || values[i] >= kLargest) {
            kRule.fail(INFINI_STATUS_BAD_PARAM, name, message("be ", least, " to 2^31 - 1"),
                       message(values[i], " for spatial dimension ", i));
        }
    }
}

// Whether the dimensions from `first` on are contiguous.
bool is_dense(const TensorView &x, int first) {
    int64_t expected = 1;
    bool holds = true;
    for (int dim = x.ndim - 1; dim >= first; --dim) {
        holds = holds && (x.shape[dim] <= 1 || x.strides[dim] == expected);
        expected *= x.shape[dim];
    }
    return holds;
}

// Whether gemm can read w as [Cout, Cin * kernel], and write an image's y as [Cout, positions], without copies.
bool w_is_matrix(const Args &args) {
    return is_dense(args.w, 1);
}

bool y_is_matrix(const Args &args) {
    return is_dense(args.y, 2);
}

int64_t whole_lines(int64_t elements, infiniDtype_t dtype) {
    return (elements * static_cast<int64_t>(size_of(dtype)) + 63) / 64 * 64;
}

int64_t tile_bytes(const Args &args) {
    return whole_lines(depth(args) * tile_columns(args), args.x.dtype);
}

// A contiguous tensor of the shape and dtype of `like`.
TensorView contiguous(const TensorView &like, void *data) {
    TensorView view = like;
    view.data = data;
    int64_t step = 1;
    for (int dim = view.ndim - 1; dim >= 0; --dim) {
        view.strides[dim] = step;
        step *= view.shape[dim];
    }
    return view;
}

// Computes y from w and y that are matrices.
void multiply(const ExecutionContext &context, const Args &args) {
    const int64_t k = depth(args), all = positions(args), wide = tile_columns(args), channels = args.w.shape[0];
    const auto matrix = [&](void *data, int64_t rows, int64_t columns, int64_t row_stride) {
        TensorView view;
        view.data = data;
        view.dtype = args.x.dtype;
        view.ndim = 2;
        view.shape[0] = rows;
        view.shape[1] = columns;
        view.strides[0] = row_stride;
        view.strides[1] = 1;
        return view;
    };
    for (int64_t image = 0; image < args.x.shape[0]; ++image) {
        for (int64_t first = 0; first < all; first += wide) {
            const int64_t columns = all - first < wide ? all - first : wide;
            cpu_kernel(context, Tile{&args, image, first, columns});
            gemm::Args product;
            char *const y =
                args.y.as<char>() + (image * args.y.strides[0] + first) * static_cast<int64_t>(size_of(args.y.dtype));
            product.c = matrix(y, channels, columns, args.y.strides[1]);
            product.a = matrix(args.w.data, channels, k, args.w.strides[0]);
            product.b = matrix(args.workspace, k, columns, columns);
            product.beta = args.bias.dtype == INFINI_DTYPE_INVALID ? 0.0f : 1.0f;
            gemm::run(context, product);
        }
    }
}

} // namespace

TensorView output_of(const Args &args) {
    const TensorView &x = args.x, &w = args.w;
    const int spatial = args.spatial;
    if (spatial < 1 || spatial > kMaxSpatial) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "n", message("be 1 to ", kMaxSpatial, ", the spatial dimensions"),
                   std::to_string(spatial));
    }
    check_parameter("padding", args.pads, spatial, 0);
    check_parameter("stride", args.strides, spatial, 1);
    check_parameter("dilation", args.dilations, spatial, 1);
    kRule.rank("x", x, spatial + 2);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.rank("weight", w, spatial + 2);
    kRule.same_dtype("weight", w, "x", x);
    if (w.shape[1] != x.shape[1]) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "weight", message("have ", x.shape[1], " input channels, as x has"),
                   message(w.shape[1], " (shape ", shape_of(w), ")"));
    }
    TensorView wanted;
    wanted.dtype = x.dtype;
    wanted.ndim = spatial + 2;
    wanted.shape[0] = x.shape[0];
    wanted.shape[1] = w.shape[0];
    for (int i = 0; i < spatial; ++i) {
        const int64_t kernel = w.shape[i + 2];
        if (kernel < 1 || kernel >= kLargest) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "weight", "have kernels of 1 to 2^31 - 1 elements", shape_of(w));
        }
        const int64_t room = x.shape[i + 2] + 2 * args.pads[i] - args.dilations[i] * (kernel - 1);
        if (room < 1) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "weight", "not be larger than the padded x",
                       message("shape ", shape_of(w), " for x ", shape_of(x)));
        }
        wanted.shape[i + 2] = (room - 1) / args.strides[i] + 1;
    }
    return wanted;
}

void check(const Args &args) {
    const TensorView wanted = output_of(args), &x = args.x, &w = args.w, &y = args.y;
    kRule.rank("out", y, wanted.ndim);
    for (int dim = 0; dim < y.ndim; ++dim) {
        if (y.shape[dim] != wanted.shape[dim]) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "out",
                       message("have shape ", shape_of(wanted), ", as x, weight and the parameters give it"),
                       shape_of(y));
        }
    }
    kRule.same_dtype("out", y, "x", x);
    kRule.writable("out", y);
    kRule.no_overlap("out", y, "x", x);
    kRule.no_overlap("out", y, "weight", w);
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        kRule.shape("bias", args.bias, {w.shape[0]}, "to match the output channels of weight");
        kRule.same_dtype("bias", args.bias, "x", x);
        kRule.no_overlap("out", y, "bias", args.bias);
    }
}

size_t workspace_size(const ExecutionContext &context, const Args &args) {
    return args.y.numel() == 0 ? 0 : kernels.workspace_bytes(context, args);
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

namespace {

size_t workspace_on_cpu(const ExecutionContext &, const Args &args) {
    int64_t bytes = tile_bytes(args);
    bytes += w_is_matrix(args) ? 0 : whole_lines(args.w.numel(), args.w.dtype);
    bytes += y_is_matrix(args) ? 0 : whole_lines(args.y.numel(), args.y.dtype);
    return static_cast<size_t>(bytes);
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    Args matrices = args;
    char *workspace = static_cast<char *>(args.workspace) + tile_bytes(args);
    if (!w_is_matrix(args)) {
        matrices.w = contiguous(args.w, workspace);
        rearrange::run(context, {matrices.w, args.w});
        workspace += whole_lines(args.w.numel(), args.w.dtype);
    }
    if (y_is_matrix(args)) {
        multiply(context, matrices);
    } else {
        matrices.y = contiguous(args.y, workspace);
        multiply(context, matrices);
        rearrange::run(context, {args.y, matrices.y});
    }
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu, workspace_on_cpu};

} // namespace
} // namespace infini::conv
