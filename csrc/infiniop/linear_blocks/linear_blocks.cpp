// The rules of linear_blocks, and the choice of its kernels.
#include "linear_blocks.h"

#include "check.h"
#include "slices.h"

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

size_t cpu_workspace(const ExecutionContext &, const Args &args) {
    return in_slices(args) ? slice_bytes(args, kSliceBytes) : 0;
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    if (!in_slices(args)) {
        return multiply_kernel(context, args);
    }
    for_each_slice(args, kSliceBytes, [&](const TensorView &weight, const TensorView &dense, linear::Args &product) {
        unpack_kernel(context, {weight, dense, args.kind});
        linear::run(context, product);
    });
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
