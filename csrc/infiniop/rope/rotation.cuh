// The rotation of a thread's slice of a head on CUDA: loads the token's angles by its position in device memory, and
// computes the formulas of rotation.h with the same roundings. For the .cu files of rope and of the ops that fuse it.
#pragma once

#include "cuda/heads.cuh"
#include "rope.h"

namespace infini::rope {

// How heads of `columns` elements of type T are rotated by angles of type A.
template <typename T, typename A> struct Rotation {
    static constexpr int kWidth = cuda::kWidth<T>;

    TensorView cos, sin, positions; // with their batch dimension, as for the CPU kernel of rope
    int half, columns;
    int turning, passing; // slices of a head that are rotated, and slices after them that pass through
    bool interleaved, has_positions, aligned;

    Rotation(const TensorView &cos, const TensorView &sin, const TensorView &positions, int64_t columns,
             bool interleaved)
        : cos(cos), sin(sin), positions(positions), half(static_cast<int>(cos.size(-1))),
          columns(cuda::checked_columns(columns)), turning(cuda::slices_of(2 * half, kWidth)),
          passing(cuda::slices_of(this->columns - 2 * half, kWidth)), interleaved(interleaved),
          has_positions(positions.dtype != INFINI_DTYPE_INVALID), aligned(cuda::vectors_fit(cos, sin)) {}

    // Slice i of a head; slices from `turning` on pass through.
    __device__ __forceinline__ cuda::Slice<T> slice(int i, bool aligned_rows) const {
        const bool turns = i < turning;
        return turns ? cuda::Slice<T>(0, 2 * half, interleaved ? turning * kWidth : half, i, aligned_rows)
                     : cuda::Slice<T>(2 * half, columns, passing * kWidth, i - turning, aligned_rows);
    }
};

// One token's cosines and sines for a slice. A position outside the tables makes them NaN.
template <typename T> class SliceRotation {
public:
    using C = cuda::Compute<T>;

    // Loads the angles of token s of batch entry b. A slice that passes through needs none.
    template <typename A>
    __device__ __forceinline__ void fetch(const Rotation<T, A> &r, const cuda::Slice<T> &slice, bool turns, int64_t b,
                                          int64_t s) {
        turns_ = turns;
        interleaved_ = r.interleaved;
        if (!turns) {
            return;
        }
        int64_t row = s, entry = b;
        if (r.has_positions) {
            row = position(r.positions, b, s);
            entry = 0;
            if (row < 0 || row >= r.cos.shape[0]) {
                const C nan = cuda::widen(cuda::narrow<T>(C(NAN)));
#pragma unroll
                for (int i = 0; i < 2 * kPairs; ++i) {
                    cos_[i / kPairs][i % kPairs] = sin_[i / kPairs][i % kPairs] = nan;
                }
                return;
            }
        }
        const A *cos = r.cos.template as<const A>() + entry * r.cos.strides[0] + row * r.cos.stride(-2);
        const A *sin = r.sin.template as<const A>() + entry * r.sin.strides[0] + row * r.sin.stride(-2);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int pair = r.interleaved ? slice.at[k] / 2 : slice.at[0] + k * kPairs;
            const int count = r.interleaved ? slice.count[k] / 2 : slice.count[0] - k * kPairs;
            const bool whole = r.aligned && count >= kPairs;
            cuda::load<kPairs>(cos_[k], cos + pair, whole, count);
            cuda::load<kPairs>(sin_[k], sin + pair, whole, count);
        }
    }

    __device__ __forceinline__ void operator()(cuda::Vector<T> (&vectors)[2]) const {
        if (!turns_) {
            return;
        }
        C v[2][2 * kPairs];
        cuda::widen(v[0], vectors[0]);
        cuda::widen(v[1], vectors[1]);
        if (interleaved_) {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; ++i) {
                const int k = i / kPairs, pair = i % kPairs;
                turn(v[k][2 * pair], v[k][2 * pair + 1], cos_[k][pair], sin_[k][pair]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kPairs; ++i) {
                turn(v[0][i], v[1][i], cos_[i / kPairs][i % kPairs], sin_[i / kPairs][i % kPairs]);
            }
        }
        vectors[0] = cuda::narrow<T>(v[0]);
        vectors[1] = cuda::narrow<T>(v[1]);
    }

private:
    static constexpr int kPairs = cuda::kWidth<T> / 2; // half the pairs of a slice

    static __device__ __forceinline__ void turn(C &x0, C &x1, C cos, C sin) {
        const C y0 = fma(x0, cos, -(x1 * sin));
        x1 = fma(x1, cos, x0 * sin);
        x0 = y0;
    }

    C cos_[2][kPairs], sin_[2][kPairs];
    bool turns_, interleaved_;
};

// On the host: calls body(T{}, A{}) with the C++ types of x and of the angles.
template <typename Body> void with_types(infiniDtype_t x, infiniDtype_t angles, const Body &body) {
    cuda::with_float_type(x, [&](auto element) {
        using T = decltype(element);
        if constexpr (sizeof(T) == 2) {
            if (angles == INFINI_DTYPE_F32) {
                return body(element, float{});
            }
        }
        body(element, element);
    });
}

} // namespace infini::rope
