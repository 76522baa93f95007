// Copies cached_attention's new rows of K and V into the cache on CUDA, in vectors of 16 bytes.
// Limit: memory bandwidth; a few rows (decode) take no longer than the launch.
// SASS: copy_rows: LDG.E.128 STG.E.128
#include "cached_attention.h"
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"

namespace infini::cached_attention {
namespace {

using cuda::RowStrides;

struct CopyRows {
    char *to;
    const char *from;
    RowStrides<2> rows; // in elements
    int64_t bytes;      // of a row
    int64_t element;
    bool whole; // vectors fit
};

__global__ void __launch_bounds__(256) copy_rows(const __grid_constant__ CopyRows a) {
    cuda::grid_dependency_sync();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.rows.count) {
        return;
    }
    int64_t at[2];
    a.rows.locate(row, at);
    auto *to = reinterpret_cast<uint8_t *>(a.to + at[0] * a.element);
    const auto *from = reinterpret_cast<const uint8_t *>(a.from + at[1] * a.element);
    for (int64_t i = threadIdx.x * 16; i < a.bytes; i += blockDim.x * 16) {
        const int count = static_cast<int>(a.bytes - i < 16 ? a.bytes - i : 16);
        const bool whole = a.whole && count == 16;
        cuda::store(to + i, cuda::load<uint8_t, 16>(from + i, whole, count), whole, count);
    }
}

void copy_on_cuda(const ExecutionContext &context, const Copy &copy) {
    const TensorView *const views[] = {&copy.to, &copy.from};
    const RowStrides<2> rows(views);
    const auto element = static_cast<int64_t>(size_of(copy.to.dtype));
    const CopyRows args{copy.to.as<char>(),
                        copy.from.as<const char>(),
                        rows,
                        copy.to.size(2) * element,
                        element,
                        cuda::vectors_fit(copy.to, copy.from)};
    constexpr unsigned kRows = 8; // a block, each copied by a warp
    infini::cuda::launch(context, copy_rows, infini::cuda::grid_x((rows.count + kRows - 1) / kRows), dim3(32, kRows), 0,
                         args);
}

const RegisteredKernel<Copy> registered{copy_kernels, INFINI_DEVICE_NVIDIA, copy_on_cuda};

} // namespace
} // namespace infini::cached_attention
