// What the CUDA kernels of ops with states share: the sequences, values in one of two dtypes, time steps, and the choice
// of a kernel by the size of a state. The offsets and slots are read on the device and cannot be refused there: tokens
// outside of x and sequences whose slot the state does not have are left out.
#pragma once

#include "check.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/scalar_types.cuh"
#include "sequence_states.h"

namespace infini::cuda {

// Where the tokens of a tensor are. Those of packed sequences are counted through all of them.
struct TokenStrides {
    int64_t sequence, token;

    TokenStrides(const TensorView &x, int inner)
        : sequence(Sequences::batched(x, inner) ? x.strides[0] : 0), token(token_stride(x, inner)) {}

    __device__ __forceinline__ int64_t at(int64_t s, int64_t t) const { return s * sequence + t * token; }
};

struct DeviceSequences {
    Indices offsets, slots; // or absent
    int64_t count;
    int64_t tokens;     // of one sequence of a batch, or of all that are packed
    int64_t state_rows; // 0: there is no state

    DeviceSequences(const Sequences &sequences, const TensorView &x, int inner, const TensorView &state)
        : count(sequences.count(x, inner)), tokens(x.shape[x.ndim - inner - 1]),
          state_rows(state.dtype ? state.shape[0] : 0) {
        if (sequences.offsets.dtype) {
            offsets = Indices(sequences.offsets);
        }
        if (sequences.slots.dtype) {
            slots = Indices(sequences.slots);
        }
    }

    // The tokens of sequence s are those from first(s) to before last(s).
    __device__ __forceinline__ int64_t first(int64_t s) const { return offsets.data ? limited(offsets[s]) : 0; }
    __device__ __forceinline__ int64_t last(int64_t s) const { return offsets.data ? limited(offsets[s + 1]) : tokens; }

    // The row of the state; negative: the sequence starts from zeros, and its state is not kept.
    __device__ __forceinline__ int64_t slot(int64_t s) const {
        return state_rows == 0 ? -1 : slots.data ? slots[s] : s;
    }
    __device__ __forceinline__ bool has(int64_t slot) const { return slot < 0 || slot < state_rows; }

    // The sequence of a packed token: the last that begins at or before it.
    __device__ __forceinline__ int64_t of_token(int64_t t) const {
        int64_t low = 0, high = count;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (offsets[middle] <= t ? low : high) = middle;
        }
        return low;
    }

private:
    __device__ __forceinline__ int64_t limited(int64_t t) const { return t < 0 ? 0 : t < tokens ? t : tokens; }
};

// Values of dtype T or float32, read and written as float.
template <typename T> struct Mixed {
    void *data;
    bool wide; // float32

    explicit Mixed(const TensorView &view) : data(view.data), wide(view.dtype == INFINI_DTYPE_F32) {}

    __device__ __forceinline__ float operator[](int64_t i) const {
        return wide ? static_cast<const float *>(data)[i] : widen(static_cast<const T *>(data)[i]);
    }
    __device__ __forceinline__ void set(int64_t i, float value) const {
        if (wide) {
            static_cast<float *>(data)[i] = value;
        } else {
            narrow_to(static_cast<T *>(data) + i, value);
        }
    }
};

// A value for each head or channel, or 0 for all.
template <typename T> struct MixedOrZero {
    Mixed<T> values;
    int64_t stride;

    explicit MixedOrZero(const TensorView &view) : values(view), stride(view.dtype ? view.strides[0] : 0) {}

    __device__ __forceinline__ float operator[](int64_t i) const { return values.data ? values[i * stride] : 0.0f; }
};

__device__ __forceinline__ float softplus(float x) {
    return x > 20 ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); // x itself above 20, as torch's; keeps NaN
}

// On the host: calls body(std::integral_constant<int, parts>{}) with the first of kParts for which parts * unit is at
// least `columns`: the values of a state's column or row that a lane holds in registers.
template <int kFirst, int... kMore, typename Body>
void with_parts(const Checker &rule, const char *name, int64_t columns, int64_t unit, const Body &body) {
    if (columns <= kFirst * unit) {
        return body(std::integral_constant<int, kFirst>{});
    }
    if constexpr (sizeof...(kMore) > 0) {
        with_parts<kMore...>(rule, name, columns, unit, body);
    } else {
        rule.fail(INFINI_STATUS_NOT_IMPLEMENTED, name, message("have at most ", kFirst * unit, " columns on CUDA"),
                  message(columns));
    }
}

} // namespace infini::cuda
