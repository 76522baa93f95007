// The rules of linear_blocks, and the choice of its kernels.
#include "linear_blocks.h"

#include "check.h"
#include "linear/linear.h"

namespace infini::linear_blocks {

KernelTable<Args> kernels{"linear_blocks"};

namespace {

constexpr Checker kRule("linear_blocks");

// A decoded slice of the weight has at most so many bytes, or 64 rows.
constexpr int64_t kSliceBytes = 8 << 20;

// Rows of bfloat16 x from which on dense products with decoded slices are faster where bfloat16 is multiplied in pairs;
// the bits are the same. Measured on one Zen 5 core, 2048 -> 5632, q8_0, ms with 16, 32, 64, 128 and 512 rows: slices 1.7,
// 2.6, 4.2, 7.3, 25; the kernel 1.5, 2.5, 4.3, 8.1, 33; dense 1.0, 1.7, 3.3, 6.3, 24. In slices of 2 MiB 1.5, 2.4, 4.3, 7.5,
// 27. In tiles, whose order of sums only linear has, all products are in slices.
constexpr int64_t kPairsFrom = 64;

bool has(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

bool multiplies_bf16_in_pairs() {
#if defined(__aarch64__)
    return cpu_capability() == kNeonBf16;
#else
    return cpu_capability() == kAvx512Bf16;
#endif
}

bool in_slices(const Args &args) {
    if (args.x.dtype != INFINI_DTYPE_BF16 || args.x.size(-1) == 0) {
        return false;
    }
    const int64_t rows = args.y.numel() / args.weight.size(0);
    return cpu_tiles() != Tiles::kNone || (multiplies_bf16_in_pairs() && rows >= kPairsFrom);
}

// Rows of a decoded slice.
int64_t slice_rows(const Args &args) {
    const int64_t row = args.x.size(-1) * static_cast<int64_t>(size_of(args.x.dtype));
    const int64_t rows = kSliceBytes / row / 64 * 64, n = args.weight.size(0);
    return rows < 64 ? (n < 64 ? n : 64) : rows < n ? rows : n;
}

size_t slice_bytes(const Args &args) {
    return static_cast<size_t>(slice_rows(args) * args.x.size(-1)) * size_of(args.x.dtype);
}

// y, by dense products with slices of the weight that are decoded to the workspace in the dtype of x.
void run_in_slices(const ExecutionContext &context, const Args &args) {
    const int64_t n = args.weight.size(0), k = args.x.size(-1), most = slice_rows(args);
    const auto part = [](const TensorView &view, int dim, int64_t first, int64_t count) {
        TensorView some = view;
        if (has(view)) {
            some.data = view.as<char>() + first * view.strides[dim] * static_cast<int64_t>(size_of(view.dtype));
            some.shape[dim] = count;
        }
        return some;
    };
    TensorView dense;
    dense.data = args.workspace;
    dense.dtype = args.x.dtype;
    dense.ndim = 2;
    dense.shape[1] = dense.strides[0] = k;
    dense.strides[1] = 1;
    for (int64_t first = 0; first < n; first += most) {
        const int64_t rows = n - first < most ? n - first : most;
        dense.shape[0] = rows;
        unpack_kernel(context, {part(args.weight, 0, first, rows), dense, args.kind});
        linear::Args product;
        product.x = args.x;
        product.y = part(args.y, args.y.ndim - 1, first, rows);
        product.weight[0] = dense;
        product.bias[0] = part(args.bias, 0, first, rows);
        linear::run(context, product);
    }
}

size_t cpu_workspace(const ExecutionContext &, const Args &args) {
    return in_slices(args) ? slice_bytes(args) : 0;
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    in_slices(args) ? run_in_slices(context, args) : multiply_kernel(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu, cpu_workspace};

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x, &weight = args.weight;
    kRule.rank("x", x, 1, kMaxDims);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.dense_last("x", x);
    kRule.rank("weight", weight, 3);
    kRule.dtype("weight", weight, {INFINI_DTYPE_U8});
    const int64_t n = weight.size(0), k = x.size(-1), elements = args.kind->elements, bytes = args.kind->bytes;
    if (k % elements != 0) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x",
                   message("have a last dimension that is a multiple of ", elements, ", the elements of a block of ",
                           args.kind->name),
                   shape_of(x));
    }
    kRule.shape("weight", weight, {n, k / elements, bytes}, "to match the last dimension of x and the kind of block");
    if (weight.numel() > 0 && (weight.stride(2) != 1 || (weight.size(1) > 1 && weight.stride(1) != bytes))) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "weight",
                   "have the blocks of a row adjacent (call .contiguous() on it)",
                   message("strides ", strides_of(weight)));
    }
    if (has(args.bias)) {
        kRule.same_dtype_or_float32("bias", args.bias, "x", x);
        kRule.shape("bias", args.bias, {n}, "to match the rows of weight");
        kRule.dense_last("bias", args.bias);
    }
}

void check_output(const Args &args) {
    kRule.rows_of_x("out", args.y, args.x, args.weight.size(0), "the rows of x by the rows of weight");
    kRule.no_overlap("out", args.y, "weight", args.weight);
    if (has(args.bias)) {
        kRule.no_overlap("out", args.y, "bias", args.bias);
    }
}

size_t workspace_size(const ExecutionContext &context, const Args &args) {
    return args.y.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::linear_blocks
