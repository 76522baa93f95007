// The CUDA kernel of causal_softmax. Limit: memory bandwidth: the visible part of a row is read, all of it written,
// about 3 bytes for each bf16 of a square.
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
