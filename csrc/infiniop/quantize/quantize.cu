// The CUDA kernels of quantize_int8 (int8_rows.cuh) and quantize_int4. For int4 half a warp or a whole one handles a
// group, with its elements in registers. Limit: memory bandwidth.
#include "int8_rows.cuh"
#include "quantize.h"

namespace infini::quantize {
namespace {

constexpr int kThreads = 256;

template <typename T> struct Groups {
    const T *w;
    uint8_t *q;
    T *scales, *zeros;
    int64_t w_stride, q_stride, scales_stride, zeros_stride;
    int64_t groups, count; // per row, in total
    bool w_whole, q_whole; // a thread's vector accesses are possible
};

template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads) int4_groups(const __grid_constant__ Groups<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kLanes = kGroup < 64 ? 16 : 32, kElements = kGroup / kLanes; // 2 or 4
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const bool mine = index < a.count; // threads without a group still take part in the shuffles
    const int64_t row = mine ? index / a.groups : 0, group = mine ? index - row * a.groups : 0;
    const int lane = threadIdx.x % kLanes;
    const int64_t column = group * kGroup + lane * kElements;
    float values[kElements];
    cuda::load(values, a.w + row * a.w_stride + column, a.w_whole, kElements);
    float least = values[0], most = values[0];
#pragma unroll
    for (int e = 1; e < kElements; ++e) {
        least = cuda::Min::join(least, values[e]);
        most = cuda::Max::join(most, values[e]);
    }
    least = cuda::warp_reduce<cuda::Min, kLanes>(least);
    most = cuda::warp_reduce<cuda::Max, kLanes>(most);
    const bool finite = least >= -3.402823466e38f && most <= 3.402823466e38f; // neither infinity nor NaN
    const float nan = __uint_as_float(0x7fc00000u);
    T scale, zero;
    cuda::narrow_to(&scale, finite ? most / 15 - least / 15 : nan);
    cuda::narrow_to(&zero, finite ? least + 8 * cuda::widen(scale) : nan);
    const float step = cuda::widen(scale), divisor = step > 0 ? step : 1, middle = cuda::widen(zero);
    cuda::Vector<uint8_t, kElements / 2> q;
#pragma unroll
    for (int e = 0; e < kElements; e += 2) {
        const auto nearest = [&](float value) {
            const float steps = min(7.0f, max(-8.0f, (value - middle) / divisor));
            return finite ? __float2int_rn(steps) + 8 : 0;
        };
        q.values[e / 2] = static_cast<uint8_t>(nearest(values[e]) | nearest(values[e + 1]) << 4);
    }
    if (!mine) {
        return;
    }
    cuda::store(a.q + row * a.q_stride + column / 2, q, a.q_whole, kElements / 2);
    if (lane == 0) {
        a.scales[row * a.scales_stride + group] = scale;
        a.zeros[row * a.zeros_stride + group] = zero;
    }
}

template <typename T, int kGroup> void launch_groups(const ExecutionContext &context, const Groups<T> &groups) {
    constexpr int64_t kInBlock = kThreads / (kGroup < 64 ? 16 : 32);
    cuda::launch(context, int4_groups<T, kGroup>, cuda::grid_x((groups.count + kInBlock - 1) / kInBlock),
                 dim3(kThreads), 0, groups);
}

void run_int8_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float_type(args.weight.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) { // the rules exclude double
            quantize_rows<T>(context, args.weight, args.q.as<int8_t>(), args.q.size(1), args.q.stride(0),
                             args.scales.as<float>());
        }
    });
}

void run_int4_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float_type(args.weight.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            const bool q_whole = reinterpret_cast<uintptr_t>(args.q.data) % 2 == 0 && args.q.stride(0) % 2 == 0;
            const Groups<T> groups{args.weight.as<const T>(), args.q.as<uint8_t>(),           args.scales.as<T>(),
                                   args.zeros.as<T>(),        args.weight.stride(0),          args.q.stride(0),
                                   args.scales.stride(0),     args.zeros.stride(0),           args.scales.size(1),
                                   args.scales.numel(),       cuda::vectors_fit(args.weight), q_whole};
            switch (args.group_size) {
            case 32:
                return launch_groups<T, 32>(context, groups);
            case 64:
                return launch_groups<T, 64>(context, groups);
            default:
                return launch_groups<T, 128>(context, groups);
            }
        }
    });
}

const RegisteredKernel<Args> int8_registered{int8_kernels, INFINI_DEVICE_NVIDIA, run_int8_on_cuda};
const RegisteredKernel<Args> int4_registered{int4_kernels, INFINI_DEVICE_NVIDIA, run_int4_on_cuda};

} // namespace
} // namespace infini::quantize
