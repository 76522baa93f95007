// The CUDA kernel of add_lora: a block for each row. Its warps compute h = x a^T, each some of the r sums, in shared
// memory; then each thread adds h b to some columns of y. Limit: memory bandwidth, a and b of each row's adapter.
#include "add_lora.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/scalar_types.cuh"
#include "indices.h"

namespace infini::add_lora {
namespace {

constexpr int kThreads = 256;

template <typename T> struct Rows {
    T *y;
    const T *x, *a, *b;
    Indices index;
    int64_t slots, rank, k, n;
    int64_t y_row, x_row, a_slot, a_row, b_slot, b_row; // strides
};

template <typename T> __global__ void __launch_bounds__(kThreads, 4) add_adapters(const __grid_constant__ Rows<T> of) {
    cuda::grid_dependency_sync();
    auto *const h = cuda::dynamic_shared<float>();
    const int64_t row = blockIdx.x;
    const int64_t slot = of.index[row];
    if (slot < 0 || slot >= of.slots) { // the whole block
        return;
    }
    const T *const x = of.x + row * of.x_row, *const a = of.a + slot * of.a_slot, *const b = of.b + slot * of.b_slot;
    T *const y = of.y + row * of.y_row;
    const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp, lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
    for (int64_t j = warp; j < of.rank; j += kThreads / cuda::kWarp) {
        float sum = 0;
        for (int64_t i = lane; i < of.k; i += cuda::kWarp) {
            sum += cuda::widen(x[i]) * cuda::widen(a[j * of.a_row + i]);
        }
        sum = cuda::warp_reduce<cuda::Sum>(sum);
        if (lane == 0) {
            h[j] = sum;
        }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < of.n; i += kThreads) {
        float sum = cuda::widen(y[i]);
        for (int64_t j = 0; j < of.rank; ++j) {
            sum += h[j] * cuda::widen(b[j * of.b_row + i]);
        }
        cuda::narrow_to(y + i, sum);
    }
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const Rows<T> rows{args.y.as<T>(),      args.x.as<const T>(), args.a.as<const T>(), args.b.as<const T>(),
                       Indices(args.index), args.a.size(0),       args.a.size(1),       args.x.size(1),
                       args.y.size(1),      args.y.stride(0),     args.x.stride(0),     args.a.stride(0),
                       args.a.stride(1),    args.b.stride(0),     args.b.stride(1)};
    const size_t shared = static_cast<size_t>(rows.rank) * sizeof(float);
    cuda::launch(context, add_adapters<T>, cuda::grid_x(args.y.size(0)), dim3(kThreads), shared, rows);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float32_or_half(args.x.dtype, [&](auto x) { launch<decltype(x)>(context, args); });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::add_lora
