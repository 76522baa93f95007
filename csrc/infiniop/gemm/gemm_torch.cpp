// torch.ops.infini.gemm and matmul, functional and out; declared in torch_infini/ops/gemm.py and matmul.py.
#include "../../torch/tensor.h"
#include "matmul.h"

#include <optional>

namespace infini::matmul {
namespace {

Args factors(const ExecutionContext &context, const Checker &rule, const Tensor &a, const Tensor &b) {
    Args args;
    args.a = view(context, rule, "a", a);
    args.b = view(context, rule, "b", b);
    return args;
}

// Checks and computes. Allocates a workspace only if cuBLAS is called: a CUDA graph would keep the memory, which a
// streamed product does not use.
void run(const ExecutionContext &context, const char *op, const Args &args) {
    gemm::Args product = product_of(op, args);
    std::optional<Tensor> workspace;
    if (const size_t bytes = matmul::workspace_bytes(context, product); bytes > 0) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        product.workspace = workspace->data_ptr();
    }
    compute(context, args, product);
}

constexpr Checker kGemm("gemm"), kMatmul("matmul");

Tensor gemm_out(const ExecutionContext &context, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                double alpha, double beta, Tensor out) {
    Args args = factors(context, kGemm, a, b);
    if (c) {
        args.c = view(context, kGemm, "c", *c);
    }
    args.alpha = alpha;
    args.beta = beta;
    args.out = view(context, kGemm, "out", out);
    run(context, "gemm", args);
    return out;
}

Tensor gemm(const ExecutionContext &context, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
            double alpha, double beta) {
    const Args args = factors(context, kGemm, a, b);
    return gemm_out(context, a, b, c, alpha, beta, empty_like(context, output_of("gemm", args.a, args.b)));
}

Tensor matmul_out(const ExecutionContext &context, const Tensor &a, const Tensor &b, Tensor out) {
    Args args = factors(context, kMatmul, a, b);
    args.out = view(context, kMatmul, "out", out);
    run(context, "matmul", args);
    return out;
}

Tensor matmul(const ExecutionContext &context, const Tensor &a, const Tensor &b) {
    const Args args = factors(context, kMatmul, a, b);
    return matmul_out(context, a, b, empty_like(context, output_of("matmul", args.a, args.b)));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("gemm", INFINI_BOX(gemm));
    m.impl("gemm.out", INFINI_BOX(gemm_out));
    m.impl("matmul", INFINI_BOX(matmul));
    m.impl("matmul.out", INFINI_BOX(matmul_out));
}

} // namespace infini::matmul
