// Rows on CUDA. RowStrides: where a row (an index over all dimensions but the last) starts in each of several tensors
// of equal shape. RowPlan: how many threads share a row, from its length alone. RowPart: one thread's part of a row.
#pragma once

#include "../tensor_view.h"
#include "packed32.cuh"

namespace infini::cuda {

template <int kTensors> struct RowStrides {
    int ndim = 0; // after merging adjacent dimensions that every tensor allows to merge
    int64_t count = 1;
    int64_t shape[kMaxDims] = {};
    int64_t strides[kTensors][kMaxDims] = {};

    // All views have the shape of views[0], apart from the last `inner` dimensions.
    explicit RowStrides(const TensorView *const (&views)[kTensors], int inner = 1) {
        const TensorView &first = *views[0];
        for (int dim = 0; dim + inner < first.ndim; ++dim) {
            const int64_t size = first.shape[dim];
            count *= size;
            if (size == 1) {
                continue;
            }
            bool merges = ndim > 0;
            for (int t = 0; t < kTensors; ++t) {
                merges = merges && strides[t][ndim - 1] == views[t]->strides[dim] * size;
            }
            ndim += merges ? 0 : 1;
            shape[ndim - 1] = merges ? shape[ndim - 1] * size : size;
            for (int t = 0; t < kTensors; ++t) {
                strides[t][ndim - 1] = views[t]->strides[dim];
            }
        }
    }

    // The row's offset in each tensor, in elements.
    __device__ __forceinline__ void locate(int64_t row, int64_t (&at)[kTensors]) const {
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
            at[t] = 0;
        }
        for (int dim = ndim - 1; dim > 0; --dim) {
            const int64_t index = row % shape[dim];
            row /= shape[dim];
#pragma unroll
            for (int t = 0; t < kTensors; ++t) {
                at[t] += index * strides[t][dim];
            }
        }
        if (ndim > 0) { // usually the only dimension: no division
#pragma unroll
            for (int t = 0; t < kTensors; ++t) {
                at[t] += row * strides[t][0];
            }
        }
    }
};

// Cuts a row of n elements into vectors of kWidth; thread t of `threads` owns vectors t, t + threads, ... The plan
// depends on n alone, so that a row has the same bits in any batch.
struct RowPlan {
    int threads; // a multiple of 32, at most 512
    int rows;    // rows per block
    int vectors; // vectors that a thread holds in registers: 1, 2 or 4; 0: the row does not fit and is read again
    int64_t blocks;

    RowPlan(int64_t row_count, int64_t n, int width) {
        const int64_t all = (n + width - 1) / width;
        vectors = all <= 256 ? 1 : all <= 512 ? 2 : all <= 2048 ? 4 : 0;
        const int64_t wanted = vectors == 0 ? 512 : (all + vectors - 1) / vectors;
        threads = static_cast<int>(wanted < 32 ? 32 : (wanted + 31) / 32 * 32);
        rows = threads < 128 ? 128 / threads : 1;
        blocks = (row_count + rows - 1) / rows;
    }

    dim3 block() const { return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)); }
};

// On the host: calls body(std::integral_constant<int, vectors>).
template <typename Body> void with_vectors(int vectors, const Body &body) {
    switch (vectors) {
    case 1:
        return body(std::integral_constant<int, 1>{});
    case 2:
        return body(std::integral_constant<int, 2>{});
    case 4:
        return body(std::integral_constant<int, 4>{});
    default:
        return body(std::integral_constant<int, 0>{});
    }
}

// A thread's part of a row. Its vectors are kept in registers as Kept (T, or Compute<T> if update must not round); with
// kVectors = 0 each pass reads them from memory. visit(body) calls body(i, count, values) for each vector: i is its
// first element, count its length, values[kWidth] the elements. visit_with(other, body) also passes the elements of
// another row of the same length, such as weights, loaded in advance. update(body) keeps what body wrote to values
// (kVectors > 0 only). kAhead: how many vectors are prefetched if the row is read again.
template <typename T, int kVectors, typename Kept = T, int kAhead = 3> class RowPart {
public:
    using C = Compute<T>;
    static constexpr int kElements = kWidth<T>;

    // whole: 16-byte accesses are allowed. Elements beyond the end read as `fill`; adjacent ones are `step` apart.
    __device__ __forceinline__ RowPart(const T *row, int64_t n, bool whole, T fill = T{}, int64_t step = 1)
        : row_(row), n_(static_cast<Index>(n)), step_(step), whole_(whole), fill_(fill) {
        if constexpr (kVectors > 0) {
            Packed32<T, kElements> read_[kVectors]; // all loads are issued before the first conversion
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (start(v) < n_) {
                    read_[v] = read(start(v));
                }
            }
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if constexpr (std::is_same_v<T, Kept>) {
                    vectors_[v] = read_[v];
                } else {
                    Vector<Kept, kElements> wide;
                    widen_packed32<T>(wide.values, read_[v]);
                    vectors_[v] = bit_cast<Held>(wide);
                }
            }
        }
    }

    template <typename Body> __device__ __forceinline__ void visit(const Body &body) { each<false>(body); }
    template <typename Body> __device__ __forceinline__ void update(const Body &body) { each<true>(body); }

    template <typename W, typename Body>
    __device__ __forceinline__ void visit_with(const RowPart<W, kVectors> &other, const Body &body) {
        static_assert(RowPart<W, kVectors>::kElements == kElements, "the two rows must be cut alike");
        if constexpr (kVectors > 0) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (start(v) < n_) {
                    C values[kElements];
                    Compute<W> others[kElements];
                    widen_packed32<Kept>(values, vectors_[v]);
                    widen_packed32<W>(others, other.vectors_[v]);
                    body(start(v), left(start(v)), values, others);
                }
            }
        } else {
            each<false>([&](int64_t i, int count, C(&values)[kElements]) {
                Compute<W> others[kElements];
                widen_packed32<W>(others, other.read(i));
                body(i, count, values, others);
            });
        }
    }

    // Whether the vector at i may be loaded in one access from every tensor that `whole` covers.
    __device__ __forceinline__ bool whole(int64_t i) const { return whole_ && static_cast<Index>(i) + kElements <= n_; }

private:
    using Index =
        // Rows in registers are short, and int halves the instructions.
        std::conditional_t<(kVectors > 0), int, int64_t>;
    using Held = Packed32<Kept, kElements>;
    template <typename OtherT, int kOtherVectors, typename OtherKept, int kOtherAhead> friend class RowPart;

    template <bool kUpdate, typename Body> __device__ __forceinline__ void each(const Body &body) {
        if constexpr (kVectors > 0) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (start(v) < n_) {
                    C values[kElements];
                    widen_packed32<Kept>(values, vectors_[v]);
                    body(start(v), left(start(v)), values);
                    if constexpr (kUpdate) {
                        vectors_[v] = bit_cast<Held>(narrow<Kept>(values));
                    }
                }
            }
        } else {
            const Index stride = start(1) - start(0);
            Packed32<T, kElements> ahead[kAhead];
#pragma unroll
            for (int v = 0; v < kAhead; ++v) {
                if (start(v) < n_) {
                    ahead[v] = read(start(v));
                }
            }
            for (Index i = start(0); i < n_; i += stride) {
                C values[kElements];
                widen_packed32<T>(values, ahead[0]);
#pragma unroll
                for (int v = 1; v < kAhead; ++v) {
                    ahead[v - 1] = ahead[v];
                }
                if (i + kAhead * stride < n_) {
                    ahead[kAhead - 1] = read(i + kAhead * stride);
                }
                body(i, left(i), values);
            }
        }
    }
    __device__ __forceinline__ Index start(int v) const {
        return (static_cast<Index>(v) * static_cast<Index>(blockDim.x) + static_cast<Index>(threadIdx.x)) * kElements;
    }
    __device__ __forceinline__ int left(Index i) const {
        return static_cast<int>(n_ - i < kElements ? n_ - i : kElements);
    }
    __device__ __forceinline__ Packed32<T, kElements> read(Index i) const {
        return load_packed32<T, kElements>(row_ + static_cast<int64_t>(i) * step_, whole(i), left(i), fill_, step_);
    }

    const T *row_;
    const Index n_;
    const int64_t step_;
    const bool whole_;
    const T fill_;
    Held vectors_[kVectors > 0 ? kVectors : 1];
};

} // namespace infini::cuda
