// The CUDA kernel of rope: each thread rotates one slice of one or two heads of a token and reads the token's position.
// Limit: memory bandwidth, each element read and written once (8192 x 32 heads x 128 bf16 at 4.3 TB/s: 31 us); for a
// few tokens the latency of reading position, angles and row.
// SASS: rotate_heads: LDG.E.128 STG.E.128
#include "cuda/heads.cuh"
#include "rope.h"
#include "rotation.cuh"

namespace infini::rope {
namespace {

using cuda::HeadPlan;

template <typename T, typename A> struct Problem {
    TensorView x, y; // [B, S, H, D]
    Rotation<T, A> rotation;
    HeadPlan plan; // its tokens are the B * S tokens of the batch
    bool aligned;
};

template <typename T, typename A>
__global__ void __launch_bounds__(cuda::kHeadThreads) rotate_heads(const __grid_constant__ Problem<T, A> a) {
    cuda::grid_dependency_sync();
    const int64_t token = a.plan.first_token() + threadIdx.y;
    if (!a.plan.has_slice() || token >= a.plan.tokens) {
        return;
    }
    const int64_t tokens = a.x.shape[1], b = a.x.shape[0] == 1 ? 0 : token / tokens, s = token - b * tokens;
    const int64_t head = a.plan.head();
    const int slice_number = a.plan.slice();
    const cuda::Slice<T> slice = a.rotation.slice(slice_number, a.aligned);
    const T *x = a.x.template as<const T>() + b * a.x.strides[0] + s * a.x.strides[1] + head * a.x.strides[2];
    T *y = a.y.template as<T>() + b * a.y.strides[0] + s * a.y.strides[1] + head * a.y.strides[2];

    cuda::Vector<T> v[cuda::kThreadHeads][2];
#pragma unroll
    for (int k = 0; k < cuda::kThreadHeads; ++k) {
        if (a.plan.owns(head, k)) {
            slice.read(v[k], x + k * a.x.strides[2]);
        }
    }
    SliceRotation<T> turn;
    turn.fetch(a.rotation, slice, slice_number < a.rotation.turning, b, s);
#pragma unroll
    for (int k = 0; k < cuda::kThreadHeads; ++k) {
        if (a.plan.owns(head, k)) {
            turn(v[k]);
            slice.write(y + k * a.y.strides[2], v[k]);
        }
    }
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    with_types(args.x.dtype, args.cos.dtype, [&](auto x, auto angle) {
        using T = decltype(x);
        using A = decltype(angle);
        const Rotation<T, A> rotation(args.cos, args.sin, args.positions, args.x.shape[3], args.interleaved);
        const bool in_place = args.x.data == args.y.data; // then columns that pass through are not copied
        const int slices = rotation.turning + (in_place ? 0 : rotation.passing);
        if (slices == 0) {
            return;
        }
        const HeadPlan plan(args.x.shape[0] * args.x.shape[1], args.x.shape[2], slices, 1);
        const Problem<T, A> problem{args.x, args.y, rotation, plan, cuda::vectors_fit(args.x, args.y)};
        cuda::launch(context, rotate_heads<T, A>, cuda::grid_x(plan.blocks), plan.threads, 0, problem);
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::rope
