// Which way of reading weights suits the CPU. A source of its own, compiled for the lowest instruction set: as an inline
// function it would be compiled for each, and linked from any.
#include "weight_reading.h"

#include <cstdlib>
#include <cstring>
#include <optional>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "status.h"

namespace infini {
namespace {

// Cores of AMD's whose kernels read in other ways than those of other CPUs.
enum class Zen { kNeither, k4, k5 };

Zen detected() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_AMD_ebx && __get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255), model = (eax >> 4 & 15) | (eax >> 12 & 0xf0);
        if (family == 0x19 && (model >= 0x60 || (model >= 0x10 && model < 0x20))) {
            return Zen::k4;
        }
        return family >= 0x1a ? Zen::k5 : Zen::kNeither;
    }
#endif
    return Zen::kNeither;
}

Zen zen() {
    static const Zen found = detected();
    return found;
}

} // namespace

bool is_zen5() {
    return zen() == Zen::k5;
}

WeightReading weight_reading(WeightReading on_zen5) {
    static const std::optional<WeightReading> wanted = []() -> std::optional<WeightReading> {
        const char *const text = std::getenv("INFINI_WEIGHT_READING");
        if (text == nullptr || *text == 0) {
            return {};
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
    if (wanted) {
        return *wanted;
    }
    return is_zen5() ? on_zen5 : zen() == Zen::k4 ? WeightReading::kOnePlace : WeightReading::kSeveralPlaces;
}

} // namespace infini
