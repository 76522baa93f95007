// How a product with few rows of x reads its weight from memory: in one place, prefetched far ahead into L2, or in
// several distant places in turn, prefetched closely into L1. Which is faster depends on the CPU: linear_group8 and
// linear_table4 with one row of x, 2048 -> 11264, on one Zen 4 core read at 0.98 of the bandwidth of a dot product in
// one place and at 0.6 in four; a Sapphire Rapids core reads at 0.61 in one place and at 0.94 in four, a Zen 5 core at
// 0.98 in four (linear_int8).
// INFINI_WEIGHT_READING=one or several overrides the choice; it changes no bit of a result.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "status.h"
#include "tensor_view.h"

namespace infini {

enum class WeightReading { kOnePlace, kSeveralPlaces };

inline bool is_zen4() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx ||
        !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255), model = (eax >> 4 & 15) | (eax >> 12 & 0xf0);
    return family == 0x19 && (model >= 0x60 || (model >= 0x10 && model < 0x20));
#else
    return false;
#endif
}

inline WeightReading weight_reading() {
    static const WeightReading found = [] {
        const char *const text = std::getenv("INFINI_WEIGHT_READING");
        if (text == nullptr || *text == 0) {
            return is_zen4() ? WeightReading::kOnePlace : WeightReading::kSeveralPlaces;
        }
        if (std::strcmp(text, "one") == 0) {
            return WeightReading::kOnePlace;
        }
        if (std::strcmp(text, "several") == 0) {
            return WeightReading::kSeveralPlaces;
        }
        throw Error(
            INFINI_STATUS_BAD_PARAM,
            message("infini: INFINI_WEIGHT_READING must be 'one' or 'several', or not be set, got '", text, "'"));
    }();
    return found;
}

// Prefetches a line into L2 if `far`, else into L1.
INFINI_ALWAYS_INLINE void prefetch_weight(const void *line, bool far) {
    if (far) {
        __builtin_prefetch(line, 0, 2);
    } else {
        __builtin_prefetch(line);
    }
}

} // namespace infini
