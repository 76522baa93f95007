// The CUDA kernel of causal_softmax. Limit: memory bandwidth. The visible part of a row is read and all of it written:
// about 3 bytes per bf16 element of a square matrix.
// SASS: softmax_rows: LDG.E.128 STG.E.128 MUFU.EX2
#include "causal_softmax.h"
#include "softmax/softmax_rows.cuh"

namespace infini::causal_softmax {
namespace {

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.x.dtype, [&](auto v) {
        if constexpr (!std::is_same_v<decltype(v), double>) {
            softmax::launch<decltype(v), false>(context, args.x, args.y, false, args.x.size(-2));
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::causal_softmax
