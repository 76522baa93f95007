// The CUDA kernel of softmax and log_softmax. Limit: memory bandwidth, 4 bytes for each bf16, against which stand an
// exponential and about 30 other instructions.
// SASS: softmax_lines: LDG.E.128 STG.E.128 MUFU.EX2
#include "softmax.h"
#include "softmax_lines.cuh"

void infini::softmax::nvidia::cuda_kernel(const Args &args) {
    const int axis = args.axis < 0 ? args.x.ndim + args.axis : args.axis;
    const TensorView x = moved_last(args.x, axis), y = moved_last(args.y, axis);
    cuda::with_float_type(x.dtype, [&](auto v) {
        if constexpr (!std::is_same_v<decltype(v), double>) {
            launch<decltype(v), true>(x, y, args.log, 0);
        }
    });
}
