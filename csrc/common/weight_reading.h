// How a product with few rows of x reads its weight from memory: in one place, prefetched far ahead into L2, or in
// several distant places in turn, prefetched closely into L1. Which is faster depends on the CPU: linear_group8 and
// linear_table4 with one row of bfloat16, 2048 -> 11264, on one Zen 4 core read (by hand: no command repeats it) at 0.98 of the bandwidth of a dot product in
// one place and at 0.6 in four; a Sapphire Rapids core reads at 0.61 in one place and at 0.94 in four, a Zen 5 core at
// 0.98 in four (linear_int8).
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
