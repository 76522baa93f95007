// Which way of reading weights suits the CPU. A source of its own, compiled for the lowest instruction set: as an inline
// function it would be compiled for each, and linked from any.
#include "weight_reading.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "status.h"

namespace infini {
namespace {

bool is_zen4() {
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

} // namespace

WeightReading weight_reading() {
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

} // namespace infini
