// The CUDA kernels of rearrange. If src and dst are dense in different dimensions, tiles are transposed in shared
// memory, so that both are accessed in whole lines; everything else is an elementwise map, in vectors of 16 bytes if
// rows are dense in both. Limit: memory bandwidth, each element read once and written once.
// SASS: map_elements: LDG.E.128 STG.E.128
#include "check.h"
#include "cuda/elementwise_map.cuh"
#include "cuda/rows.cuh"
#include "rearrange.h"

#include <algorithm>
#include <cstdlib>

namespace infini::rearrange {
namespace {

struct alignas(16) Bits128 {
    uint64_t halves[2];
};

constexpr int kLanes = 32, kLines = 8; // threads per block: x along a line, y lines at a time
constexpr int64_t kMinSide = 16;       // the least side for which tiles pay off

// Elements per side of a tile; a line of it has at least 64 bytes.
template <typename T> constexpr int kSide = sizeof(T) <= 2 ? 64 : 32;
// Elements between lines of the tile in shared memory: an odd number of 4-byte words (or of elements, if these are
// larger), so that the elements of a column lie in different banks.
template <typename T> constexpr int kPitch = kSide<T> + (sizeof(T) >= 4 ? 1 : 4 / sizeof(T));

template <typename T> struct Transposition {
    T *dst;
    const T *src;
    cuda::RowStrides<2> others; // all dimensions but the last two
    int64_t rows, columns;
    int64_t to_row, to_column;     // strides in dst, where the column's is the smaller one,
    int64_t from_row, from_column; // and in src, where the row's is the smaller one
    int64_t down, across;          // number of tiles
};

template <typename T>
__global__ void __launch_bounds__(kLanes *kLines) transpose_tiles(const __grid_constant__ Transposition<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kTile = kSide<T>;
    INFINI_SHARED(tile, T[kTile][kPitch<T>]); // [column][row]
    const int64_t block = blockIdx.x, line = block / a.across;
    const int64_t left = (block - line * a.across) * kTile;
    const int64_t other = line / a.down, top = (line - other * a.down) * kTile;
    int64_t at[2];
    a.others.locate(other, at);
    const T *src = a.src + at[1] + top * a.from_row + left * a.from_column;
    T *dst = a.dst + at[0] + top * a.to_row + left * a.to_column;
    const int rows = static_cast<int>(min(a.rows - top, int64_t{kTile}));
    const int columns = static_cast<int>(min(a.columns - left, int64_t{kTile}));
#pragma unroll
    for (int c = 0; c < kTile; c += kLines) {
#pragma unroll
        for (int r = 0; r < kTile; r += kLanes) {
            const int column = c + threadIdx.y, row = r + threadIdx.x;
            if (column < columns && row < rows) {
                tile[column][row] = src[row * a.from_row + column * a.from_column];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kTile; r += kLines) {
#pragma unroll
        for (int c = 0; c < kTile; c += kLanes) {
            const int column = c + threadIdx.x, row = r + threadIdx.y;
            if (column < columns && row < rows) {
                dst[row * a.to_row + column * a.to_column] = tile[column][row];
            }
        }
    }
}

template <typename T> void transpose(const ExecutionContext &context, const TensorView (&views)[2]) {
    const TensorView *const walked[] = {&views[0], &views[1]};
    const TensorView &dst = views[0], &src = views[1];
    const auto tiles = [](int64_t size) { return (size + kSide<T> - 1) / kSide<T>; };
    const Transposition<T> a{dst.as<T>(),         src.as<const T>(),  cuda::RowStrides<2>(walked, 2),
                             dst.size(-2),        dst.size(-1),       dst.stride(-2),
                             dst.stride(-1),      src.stride(-2),     src.stride(-1),
                             tiles(dst.size(-2)), tiles(dst.size(-1))};
    cuda::launch(context, transpose_tiles<T>, cuda::grid_x(a.others.count * a.down * a.across), dim3(kLanes, kLines), 0,
                 a);
}

struct Copy {
    template <typename Each> __device__ __forceinline__ void operator()(const Each &each) const {
        each([](auto value) { return value; });
    }
};

// The dimension with the smallest stride in src.
int densest(const TensorView &src) {
    int found = src.ndim - 1;
    for (int dim = found - 1; dim >= 0; --dim) {
        const int64_t stride = std::abs(src.strides[dim]);
        found = stride != 0 && stride < std::abs(src.strides[found]) ? dim : found;
    }
    return found;
}

// Copies views with strides in bytes as views of elements of type T.
template <typename T> void copy(const ExecutionContext &context, TensorView (&views)[2], infiniDtype_t dtype) {
    for (TensorView &view : views) {
        view.dtype = dtype;
        for (int dim = 0; dim < view.ndim; ++dim) {
            view.strides[dim] /= static_cast<int64_t>(sizeof(T));
        }
    }
    const int last = views[0].ndim - 1, dense = densest(views[1]);
    if (dense == last || views[0].shape[dense] < kMinSide || views[0].shape[last] < kMinSide) {
        return cuda::map<T, 1>(context, views, 0, Copy{});
    }
    move_dim(views, dense, last - 1);
    transpose<T>(context, views);
}

// The largest power of two, up to 16, that divides the number.
int64_t alignment(int64_t number) {
    return number % 16 == 0 ? 16 : number & -number;
}

// Splits elements into `parts` smaller ones: appends a dimension of stride 1.
void split_elements(TensorView (&views)[2], int64_t parts, int64_t bytes) {
    for (TensorView &view : views) {
        if (view.ndim == kMaxDims) {
            Checker("rearrange")
                .fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "every tensor",
                      "be aligned to the size of its elements on CUDA, or have fewer dimensions",
                      message(view.ndim, " dimensions"));
        }
        view.shape[view.ndim] = parts;
        view.strides[view.ndim++] = bytes;
    }
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    auto size = static_cast<int64_t>(size_of(args.dst.dtype));
    // Strides are in bytes until the unit of copying is known: a run of small elements is copied as larger ones.
    TensorView views[] = {args.dst, args.src};
    for (TensorView &view : views) {
        view.dtype = INFINI_DTYPE_BYTE;
        for (int dim = 0; dim < view.ndim; ++dim) {
            view.strides[dim] *= size;
        }
    }
    coalesce_dims(views);
    if (views[0].numel() == 1) {
        views[0].strides[0] = views[1].strides[0] = size;
    }
    const auto is_run = [&] { return views[0].stride(-1) == size && views[1].stride(-1) == size; };
    int64_t aligned = 16; // common alignment of addresses and outer strides, in bytes
    for (const TensorView &view : views) {
        aligned = std::min(aligned, alignment(static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data))));
        for (int dim = 0; dim < view.ndim - (is_run() ? 1 : 0); ++dim) {
            aligned = std::min(aligned, alignment(view.strides[dim]));
        }
    }
    if (aligned < size) { // complex numbers, which may be aligned to their halves only
        split_elements(views, size / aligned, aligned);
        coalesce_dims(views);
        size = aligned;
    }
    if (is_run()) {
        const int64_t run = views[0].size(-1) * size;
        size = std::min(aligned, alignment(run));
        for (TensorView &view : views) {
            view.shape[view.ndim - 1] = run / size;
            view.strides[view.ndim - 1] = size;
        }
        if (run == size && views[0].ndim > 1) {
            coalesce_dims(views);
        }
    }
    switch (size) {
    case 1:
        return copy<uint8_t>(context, views, INFINI_DTYPE_U8);
    case 2:
        return copy<uint16_t>(context, views, INFINI_DTYPE_U16);
    case 4:
        return copy<uint32_t>(context, views, INFINI_DTYPE_U32);
    case 8:
        return copy<uint64_t>(context, views, INFINI_DTYPE_U64);
    default:
        return copy<Bits128>(context, views, INFINI_DTYPE_C128);
    }
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::rearrange
