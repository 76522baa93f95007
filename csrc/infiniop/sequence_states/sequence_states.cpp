// The rules of sequences with states.
#include "sequence_states.h"

#include "check.h"

#include <algorithm>
#include <vector>

namespace infini {

void check_sequences(const Checker &rule, const Sequences &sequences, const char *name, const TensorView &x, int inner,
                     const TensorView &state) {
    const TensorView &offsets = sequences.offsets, &slots = sequences.slots;
    if (offsets.dtype) {
        if (Sequences::batched(x, inner)) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "offsets", "be None for a batch",
                      message("some for ", name, " of shape ", shape_of(x)));
        }
        rule.dtype("offsets", offsets, INFINI_INDICES);
        rule.rank("offsets", offsets, 1);
        if (offsets.shape[0] < 1) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "offsets", "have an element more than there are sequences",
                      shape_of(offsets));
        }
    }
    const int64_t count = sequences.count(x, inner);
    if (slots.dtype) {
        if (!state.dtype) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "slots", "be None without a state", "some");
        }
        rule.dtype("slots", slots, INFINI_INDICES);
        rule.shape("slots", slots, {count}, "one for each sequence");
    } else if (state.dtype && state.shape[0] != count) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "state",
                  message("have a row for each of the ", count, " sequences if there are no slots"), shape_of(state));
    }
}

void check_sequence_values(const Checker &rule, const Sequences &sequences, const TensorView &x,
                           const TensorView &state) {
    if (sequences.offsets.dtype) {
        const Indices offsets(sequences.offsets);
        const int64_t last = sequences.offsets.shape[0] - 1;
        for (int64_t i = 0; i <= last; ++i) {
            const int64_t low = i == 0 ? 0 : offsets[i - 1];
            if (offsets[i] < low || (i == 0 && offsets[0] != 0) || (i == last && offsets[i] != x.shape[0])) {
                rule.fail(INFINI_STATUS_BAD_PARAM, "offsets",
                          message("rise from 0 to the number of tokens, ", x.shape[0]),
                          message(offsets[i], " at position ", i));
            }
        }
    }
    if (sequences.slots.dtype) {
        std::vector<int64_t> used;
        for (int64_t s = 0; s < sequences.slots.shape[0]; ++s) {
            const int64_t slot = Indices(sequences.slots)[s];
            if (slot >= state.shape[0]) {
                rule.fail(INFINI_STATUS_BAD_PARAM, "slots", message("be less than the ", state.shape[0], " of state"),
                          message(slot, " for sequence ", s));
            }
            if (slot >= 0) {
                used.push_back(slot);
            }
        }
        std::sort(used.begin(), used.end());
        const auto twice = std::adjacent_find(used.begin(), used.end());
        if (twice != used.end()) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "slots", "differ from sequence to sequence", message(*twice, " twice"));
        }
    }
}

void check_no_overlap(const Checker &rule, std::initializer_list<NamedInput> inputs, const Sequences &sequences,
                      const TensorView &state, const TensorView &y) {
    const auto check = [&](const char *name, const TensorView &input) {
        if (input.dtype) {
            rule.no_overlap("out", y, name, input);
            if (state.dtype) {
                rule.no_overlap("state", state, name, input);
            }
        }
    };
    for (const NamedInput &input : inputs) {
        check(input.name, input.tensor);
    }
    check("offsets", sequences.offsets);
    check("slots", sequences.slots);
    if (state.dtype) {
        rule.no_overlap("state", state, "out", y);
    }
}

} // namespace infini
