// How a product with few rows of x reads its weight from memory: in one place, prefetched far ahead into L2 or by the
// hardware alone, or in several distant places in turn, prefetched closely into L1. Which is faster depends on the CPU:
// linear_group8 and linear_table4 with one row on a Zen 4 core read as fast as a sum of floats in one place, and at 0.6
// of that in four; a Sapphire Rapids core reads at 0.61 of the bandwidth in one place and at 0.94 in four, a Zen 5 core
// at 0.98 in four (linear_int8).
// INFINI_WEIGHT_READING=one or several overrides the choice; it changes no bit of a result.
#pragma once

#include "tensor_view.h"

namespace infini {

enum class WeightReading { kOnePlace, kSeveralPlaces };

WeightReading weight_reading();

// Prefetches a line into L2 if `far`, else into L1.
INFINI_ALWAYS_INLINE void prefetch_weight(const void *line, bool far) {
    if (far) {
        __builtin_prefetch(line, 0, 2);
    } else {
        __builtin_prefetch(line);
    }
}

} // namespace infini
