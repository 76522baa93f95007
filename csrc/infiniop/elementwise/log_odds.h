// log((1 - p) / p) for the normal distribution function p of z, with AVX-512. gelu of half types is this plus the
// arithmetic of silu, a quotient of exponentials. It uses cubic minimax polynomials over 16 intervals; each coefficient
// is a vector from which a permutation selects a value per lane.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)

namespace infini::INFINI_LEVEL {
namespace {

constexpr float kLogOddsEnd = 14.9375f;

// For 0 <= z <= kLogOddsEnd, to within 1.6e-5. The exponent of z + 1 and the first two bits of its mantissa give the
// interval: 4 each in [0, 1), [1, 3), [3, 7) and [7, 15). The permutation uses the last four bits of the index; the
// exponent 127 of [1, 2) gives 12 to 15.
inline VecF log_odds(VecF z) {
    alignas(64) static constexpr float kCoefficients[4][16] = {
        {-0.0643320084f, -0.0498203821f, -0.0313948728f, -0.0163337439f, -0.00580491638f, -0.00237975013f,
         -0.00144402951f, -0.000949941052f, -0.000554735307f, -0.000300023064f, -0.000179096154f, -0.000114966977f,
         -0.072656177f, -0.0724876747f, -0.071835041f, -0.07015495f},
        {-0.0238196738f, -0.0899913684f, -0.200560272f, -0.312768102f, -0.408608735f, -0.448343843f, -0.462202251f,
         -0.47103104f, -0.479477465f, -0.486255735f, -0.490206569f, -0.492689371f, -3.27184648e-06f, -0.0001462855f,
         -0.00116953556f, -0.00503115589f},
        {-1.57193995f, -1.4709326f, -1.24920261f, -0.970095158f, -0.678651333f, -0.524668932f, -0.456139296f,
         -0.403492451f, -0.343217313f, -0.282970607f, -0.239886835f, -0.207814157f, -1.59576893f, -1.59572756f,
         -1.59518838f, -1.5922178f},
        {-0.00817884784f, -0.0597819462f, -0.208370447f, -0.440168947f, -0.736224115f, -0.93559134f, -1.04874265f,
         -1.15351009f, -1.29712176f, -1.47598398f, -1.6328094f, -1.77104843f, -1.72156212e-09f, -4.0479249e-06f,
         -9.93962094e-05f, -0.000864063099f},
    };
    const auto interval = (__m512i)((VecU)(z + splat(1.0f)) >> 21);
    const auto coefficient = [&](int i) {
        return (VecF)_mm512_permutexvar_ps(interval, (__m512)load(kCoefficients[i]));
    };
    return fma(fma(fma(coefficient(0), z, coefficient(1)), z, coefficient(2)), z, coefficient(3));
}

} // namespace
} // namespace infini::INFINI_LEVEL

#endif
