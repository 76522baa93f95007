// The sequences of ops that carry a state: tokens [batch, length, ...] or packed [tokens, ...] with offsets, and the row
// of the state that belongs to each sequence. Shared by causal_conv1d, gated_delta_rule, ssd and selective_scan.
#pragma once

#include "indices.h"
#include "tensor_view.h"

#include <initializer_list>

namespace infini {
class Checker;

struct Sequences {
    TensorView offsets; // [sequences + 1] int64 or int32, or absent
    TensorView slots;   // [sequences] int64 or int32, or absent: sequence s has row s

    // Of x, whose dimensions after the tokens are `inner`.
    INFINI_ALWAYS_INLINE static bool batched(const TensorView &x, int inner) { return x.ndim == inner + 2; }

    INFINI_ALWAYS_INLINE int64_t count(const TensorView &x, int inner) const {
        return batched(x, inner) ? x.shape[0] : offsets.dtype ? offsets.shape[0] - 1 : 1;
    }

    INFINI_ALWAYS_INLINE int64_t length(const TensorView &x, int inner, int64_t s) const {
        return batched(x, inner) ? x.shape[1]
               : offsets.dtype   ? Indices(offsets)[s + 1] - Indices(offsets)[s]
                                 : x.shape[0];
    }

    // Where the first token of sequence s is, in elements.
    INFINI_ALWAYS_INLINE int64_t start(const TensorView &x, int inner, int64_t s) const {
        return batched(x, inner) ? s * x.strides[0] : offsets.dtype ? Indices(offsets)[s] * x.strides[0] : 0;
    }

    // Negative: the sequence starts from zeros, and its state is not kept.
    INFINI_ALWAYS_INLINE int64_t slot(int64_t s) const { return slots.dtype ? Indices(slots)[s] : s; }
};

// The stride from token to token.
INFINI_ALWAYS_INLINE int64_t token_stride(const TensorView &x, int inner) {
    return x.strides[x.ndim - inner - 1];
}

// Checks dtypes and shapes, and that the state, if there is one, has a row for each sequence.
void check_sequences(const Checker &rule, const Sequences &sequences, const char *name, const TensorView &x, int inner,
                     const TensorView &state);
// Checks the offsets and slots, which are read: CPU only.
void check_sequence_values(const Checker &rule, const Sequences &sequences, const TensorView &x,
                           const TensorView &state);

struct NamedInput {
    const char *name;
    const TensorView &tensor; // or absent
};

// Checks that what is written, y ("out") and the state if there is one, overlaps neither the inputs, offsets and slots nor
// each other.
void check_no_overlap(const Checker &rule, std::initializer_list<NamedInput> inputs, const Sequences &sequences,
                      const TensorView &state, const TensorView &y);

} // namespace infini
