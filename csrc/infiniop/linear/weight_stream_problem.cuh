// The arguments of weight_stream.cuh and float_stream.cuh: up to three weights, rows of x and y of any strides, and the
// epilogue y = alpha * sum * row_scales * scales + beta * y + bias, which is rounded before a residual is added. The
// product is cut into tiles: some rows of x by 16 rows of a weight or a multiple.
#pragma once

#include "cuda/int_divider.cuh"
#include "cuda/launch.cuh"
#include "cuda/scalar_types.cuh"
#include "cuda/rows.cuh"

namespace infini::weight_stream {

constexpr int kMaxWeights = 3;
constexpr int kBandRows = 16; // of the weight, that the tensor cores take at once
constexpr int kWarps = 8;

// An optional vector of floats of any floating dtype.
struct FloatVector {
    const void *data = nullptr; // nullptr: absent
    infiniDtype_t dtype = INFINI_DTYPE_INVALID;
    int64_t stride = 1; // in elements

    FloatVector() = default;
    // From a view of one dimension, or of rows, whose distance is the stride.
    FloatVector(const TensorView &view, int64_t stride_)
        : data(view.dtype != INFINI_DTYPE_INVALID ? view.data : nullptr), dtype(view.dtype), stride(stride_) {}

    __device__ __forceinline__ float operator[](int64_t i) const {
        switch (dtype) {
        case INFINI_DTYPE_BF16:
            return cuda::widen(static_cast<const bf16 *>(data)[i]);
        case INFINI_DTYPE_F16:
            return cuda::widen(static_cast<const f16 *>(data)[i]);
        default:
            return static_cast<const float *>(data)[i];
        }
    }
};

struct Weight {
    const unsigned char *data;
    int64_t n;            // rows of the weight, columns of y
    int64_t row, element; // strides of rows and of elements of k (for int4 of bytes), in bytes
    bool whole;           // 16 bytes of a row can be read at once, from any multiple of 16 on
    int64_t first_tile;   // of those that the grid's weights are cut into, without regard to rows of x
    int64_t first_column; // of y
    FloatVector scales;   // one per row, or absent
    FloatVector bias;

    // weight: [n, elements or bytes of k], with any strides.
    static Weight of(const TensorView &weight, int64_t first_column) {
        const auto size = static_cast<int64_t>(size_of(weight.dtype));
        const int64_t row = weight.stride(0) * size, element = weight.stride(1) * size;
        const bool dense = weight.size(1) <= 1 || element == size;
        const bool aligned =
            reinterpret_cast<uintptr_t>(weight.data) % 16 == 0 && (row % 16 == 0 || weight.size(0) <= 1);
        return {weight.as<const unsigned char>(),
                weight.size(0),
                row,
                dense ? size : element,
                dense && aligned,
                0,
                first_column,
                {},
                {}};
    }
};

template <typename X> struct Problem {
    const X *x;
    bool x_whole; // rows of x can be read in vectors
    int64_t m, k;
    cuda::RowStrides<2> rows; // x, y
    int weights;
    Weight weight[kMaxWeights];
    // Groups along k, for int4.
    FloatVector scales, zeros; // [n, k / group]; the stride is that of rows
    int group_shift;           // groups are of 1 << group_shift elements: 32, 64 or 128
    // y = alpha * sum * row_scales * scales + beta * y + bias.
    void *y;
    infiniDtype_t y_dtype;
    int64_t y_column;       // column stride
    const void *residual;   // dtype and strides of y, which it may alias; nullptr: no residual
    FloatVector row_scales; // one per row of x, or absent
    float alpha, beta;
    // The tiles of the product. Those that share rows of a weight are adjacent, to share the cache.
    uint32_t tiles;
    cuda::IntDivider<uint32_t> x_tiles; // the number of tiles that share rows of a weight

    // y and x have the same shape except for the last dimension.
    Problem(const TensorView &y_view, const TensorView &x_view)
        : x(x_view.as<const X>()), x_whole(cuda::vectors_fit(x_view)), m(0), k(x_view.size(-1)),
          rows({&x_view, &y_view}), weights(0), weight{}, group_shift(0), y(y_view.data), y_dtype(y_view.dtype),
          y_column(y_view.size(-1) > 1 ? y_view.stride(-1) : 1), residual(nullptr), alpha(1), beta(0), tiles(0) {
        m = rows.count;
    }
    void add(const TensorView &view) {
        const int64_t column = weights > 0 ? weight[weights - 1].first_column + weight[weights - 1].n : 0;
        weight[weights++] = Weight::of(view, column);
    }
    // Cuts the product into tiles of x_rows by weight_rows and returns their number.
    unsigned cut(int64_t x_rows, int64_t weight_rows) {
        int64_t count = 0;
        for (int i = 0; i < weights; ++i) {
            weight[i].first_tile = count;
            count += (weight[i].n + weight_rows - 1) / weight_rows;
        }
        const int64_t shared = (m + x_rows - 1) / x_rows;
        tiles = cuda::grid_x(count * shared);
        x_tiles = cuda::IntDivider<uint32_t>(static_cast<uint32_t>(shared));
        return tiles;
    }
};

// The index of a tile's weight.
template <typename X> __device__ __forceinline__ int weight_of(const Problem<X> &a, int64_t tile) {
    int i = 0;
    while (i + 1 < a.weights && tile >= a.weight[i + 1].first_tile) {
        ++i;
    }
    return i;
}

// Rounds a value to y's type, then adds the residual and rounds again, as a separate addition would.
template <typename T> __device__ __forceinline__ void write(void *y, const void *residual, int64_t to, float value) {
    T *const out = static_cast<T *>(y) + to;
    if (residual != nullptr) {
        T rounded;
        cuda::narrow_to(&rounded, value);
        value = cuda::widen(rounded) + cuda::widen(static_cast<const T *>(residual)[to]);
    }
    cuda::narrow_to(out, value);
}

// What a row and a column of y contribute to the epilogue.
struct OutputRow {
    int64_t offset;
    float scale;
};
struct OutputColumn {
    int64_t offset;
    float scale, bias; // 1 and 0 where the weight has none
};

template <typename X> __device__ __forceinline__ OutputRow row_of(const Problem<X> &a, int64_t m) {
    int64_t at[2];
    a.rows.locate(m, at);
    return {at[1], a.row_scales.data != nullptr ? a.row_scales[m * a.row_scales.stride] : a.alpha};
}

template <typename X>
__device__ __forceinline__ OutputColumn column_of(const Problem<X> &a, const Weight &w, int64_t n) {
    return {(w.first_column + n) * a.y_column, w.scales.data != nullptr ? w.scales[n * w.scales.stride] : 1.0f,
            w.bias.data != nullptr ? w.bias[n * w.bias.stride] : 0.0f};
}

// Computes y from one sum.
template <typename X>
__device__ __forceinline__ void finish(const Problem<X> &a, const Weight &w, const OutputRow &row,
                                       const OutputColumn &column, float sum) {
    const int64_t to = row.offset + column.offset;
    float value = sum * (row.scale * column.scale);
    if (a.beta != 0) {
        FloatVector old;
        old.data = a.y;
        old.dtype = a.y_dtype;
        value += a.beta * old[to];
    }
    if (w.bias.data != nullptr) {
        value += column.bias;
    }
    switch (a.y_dtype) {
    case INFINI_DTYPE_BF16:
        return write<bf16>(a.y, a.residual, to, value);
    case INFINI_DTYPE_F16:
        return write<f16>(a.y, a.residual, to, value);
    default:
        return write<float>(a.y, a.residual, to, value);
    }
}

template <typename X>
__device__ __forceinline__ void finish(const Problem<X> &a, const Weight &w, int64_t m, int64_t n, float sum) {
    finish(a, w, row_of(a, m), column_of(a, w, n), sum);
}

} // namespace infini::weight_stream
