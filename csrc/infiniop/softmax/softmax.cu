// The CUDA kernel of softmax and log_softmax. Limit: memory bandwidth, 4 bytes per bf16 element; an element takes one
// exponential and about 30 other instructions.
// SASS: softmax_rows: LDG.E.128 STG.E.128 MUFU.EX2
#include "softmax.h"
#include "softmax_rows.cuh"

namespace infini::softmax {
namespace {

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    const int axis = args.axis < 0 ? args.x.ndim + args.axis : args.axis;
    const TensorView x = moved_last(args.x, axis), y = moved_last(args.y, axis);
    cuda::with_float_type(x.dtype, [&](auto v) {
        if constexpr (!std::is_same_v<decltype(v), double>) {
            launch<decltype(v), true>(context, x, y, args.log, 0);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::softmax
