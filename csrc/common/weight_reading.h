// How a product with few rows of x reads its weight from memory: in one place, prefetched far ahead into L2 or by the
// hardware alone, or in several distant places in turn, prefetched closely into L1. Which is faster depends on the CPU:
// linear_group8 and linear_table4 with one row on a Zen 4 core read as fast as a sum of floats in one place, and at 0.6
// of that in four; a Sapphire Rapids core reads at 0.61 of the bandwidth in one place and at 0.94 in four. On a Zen 5 core
// it depends on the kernel: these two are 1.3 to 2.4 times as fast in one place, linear_int4 1.4 to 2.1 times in four.
// INFINI_WEIGHT_READING=one or several overrides the choice; it changes no bit of a result.
#pragma once

#include "tensor_view.h"

namespace infini {

enum class WeightReading { kOnePlace, kSeveralPlaces };

// on_zen5: what suits the calling kernel on a Zen 5 core.
WeightReading weight_reading(WeightReading on_zen5 = WeightReading::kSeveralPlaces);

// Whether this is a Zen 5 core, or a later one of AMD's: what is prefetched in one place differs from a Zen 4 core.
bool is_zen5();

// Prefetches a line into L2 if `far`, else into L1.
INFINI_ALWAYS_INLINE void prefetch_weight(const void *line, bool far) {
    if (far) {
        __builtin_prefetch(line, 0, 2);
    } else {
        __builtin_prefetch(line);
    }
}

} // namespace infini
