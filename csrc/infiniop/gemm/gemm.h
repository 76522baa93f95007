// gemm: c = alpha * a @ b + beta * c, for single matrices or a batch; a or b may be shared by the whole batch. Every
// matrix is row-major or column-major (stride 1 in one of its two dimensions). The other stride and the batch stride
// are arbitrary: padded, negative, and for a and b also 0.
#pragma once

#include <cstddef>

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini {
class Checker;
}

namespace infini::gemm {

// Products are summed in float, alpha and beta are applied in float, and the result is rounded once. The order of the
// sum depends only on k and the dtype: an element of c has the same bits for any shape, batch, layout and thread count.
// On AVX-512 BF16, bfloat16 products are added in pairs and denormals count as zero, as in that instruction. On CUDA
// cuBLAS computes most products, in an order that it chooses by shape, strides and alignment; if alpha is 0, it does
// not read a and b.
// If beta == 0, c is not read; if k == 0, c = beta * c.
struct Args {
    TensorView c; // [m, n] or [batch, m, n]; shares no memory with a or b
    TensorView a; // [m, k] or [batch or 1, m, k], the dtype of c
    TensorView b; // [k, n] or [batch or 1, k, n], the dtype of c
    float alpha = 1;
    float beta = 0;
    void *workspace = nullptr; // CUDA: workspace_bytes() bytes for cuBLAS; nullptr: cuBLAS allocates
};

// The workspace for cuBLAS that its documentation recommends for an H100, with room to align it.
constexpr size_t kWorkspaceBytes = (32 << 20) + 256;

// Checks for stride 1 in one of the last two dimensions; strides of dimensions with at most one element are ignored.
void check_layout(const Checker &rule, const char *name, const TensorView &x);

// Checks the arguments against the rules above; overlap only for views that have memory.
void check(const Args &args);

// Checks the arguments, then computes c.
void run(const ExecutionContext &context, const Args &args);

// Computes c. Call after check(); c must not be empty.
void compute(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args) // for bfloat16
extern KernelTable<Args> kernels;

// The bytes that run needs at args.workspace. Depends on the layouts; 0 without cuBLAS. Call after check().
inline size_t workspace_bytes(const ExecutionContext &context, const Args &args) {
    return args.c.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

} // namespace infini::gemm
