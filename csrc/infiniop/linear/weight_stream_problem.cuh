// The arguments of weight_stream.cuh and float_stream.cuh: up to three weights, rows of x and y of any strides, and the
// epilogue y = alpha * sum * row_scales * scales + beta * y + bias, which is rounded before a residual is added. In
// both kernels a thread block handles 16 rows of a weight.
#pragma once

#include "cuda/int_divider.cuh"
#include "cuda/launch.cuh"
#include "cuda/scalar_types.cuh"
#include "cuda/rows.cuh"

namespace infini::weight_stream {

constexpr int kMaxWeights = 3;
constexpr int kBlockRows = 16; // of the weight
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
    int64_t first_block, first_column;
    FloatVector scales; // one per row, or absent
    FloatVector bias;

    // weight: [n, elements or bytes of k], with any strides.
    static Weight of(const TensorView &weight, int64_t first_block, int64_t first_column) {
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
                first_block,
                first_column,
                {},
                {}};
    }
    int64_t blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
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
    cuda::IntDivider<uint32_t> x_tiles; // thread blocks that share rows of the weight; adjacent, to share the cache

    // y and x have the same shape except for the last dimension.
    Problem(const TensorView &y_view, const TensorView &x_view)
        : x(x_view.as<const X>()), x_whole(cuda::vectors_fit(x_view)), m(0), k(x_view.size(-1)),
          rows({&x_view, &y_view}), weights(0), weight{}, group_shift(0), y(y_view.data), y_dtype(y_view.dtype),
          y_column(y_view.size(-1) > 1 ? y_view.stride(-1) : 1), residual(nullptr), alpha(1), beta(0) {
        m = rows.count;
    }
    void add(const TensorView &view) {
        const Weight *const last = weights > 0 ? &weight[weights - 1] : nullptr;
        weight[weights++] = last ? Weight::of(view, last->first_block + last->blocks(), last->first_column + last->n)
                                 : Weight::of(view, 0, 0);
    }
    // Assigns this many thread blocks to every block of weight rows; returns the number of thread blocks.
    unsigned share(int64_t tiles) {
        const unsigned all = cuda::grid_x(blocks() * tiles);
        x_tiles = cuda::IntDivider<uint32_t>(static_cast<uint32_t>(tiles));
        return all;
    }
    int64_t blocks() const { return weight[weights - 1].first_block + weight[weights - 1].blocks(); }
};

// The index of a block's weight.
template <typename X> __device__ __forceinline__ int weight_of(const Problem<X> &a, int64_t block) {
    int i = 0;
    while (i + 1 < a.weights && block >= a.weight[i + 1].first_block) {
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

// Computes y from one sum.
template <typename X>
__device__ __forceinline__ void finish(const Problem<X> &a, const Weight &w, int64_t m, int64_t n, float sum) {
    int64_t at[2];
    a.rows.locate(m, at);
    const int64_t to = at[1] + (w.first_column + n) * a.y_column;
    float scale = a.alpha;
    if (a.row_scales.data != nullptr) {
        scale = a.row_scales[m * a.row_scales.stride];
    }
    if (w.scales.data != nullptr) {
        scale *= w.scales[n * w.scales.stride];
    }
    float value = sum * scale;
    if (a.beta != 0) {
        FloatVector old;
        old.data = a.y;
        old.dtype = a.y_dtype;
        value += a.beta * old[to];
    }
    if (w.bias.data != nullptr) {
        value += w.bias[n * w.bias.stride];
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

} // namespace infini::weight_stream
