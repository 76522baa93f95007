// Steps: the products of x with weights along k, a vector at a time: in float, or bfloat16 in pairs where the level has
// instructions for that. Kernels that sum steps in one order give the same bits. Included only by *_cpu.cpp files.
#pragma once

#include <cstring>

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// How weights of type W are multiplied: a step covers kStep elements of k; x is packed as type X.
template <typename W> struct Steps {
    using X = float;
    static constexpr int kStep = kLanes;
    static VecF load_weight(const W *p) { return load(p); }
    static VecF load_weight(const W *p, int n) { return load(p, n); }
    static VecF load_x(const X *p) { return load(p); }
    static VecF multiply_add(VecF w, VecF x, VecF sum) { return fma(w, x, sum); }
};

#if defined(__AVX512BF16__)
// Two adjacent elements of k per lane, 32 per step. The instruction treats denormal inputs and sums as zero.
template <> struct Steps<bf16> {
    using X = bf16;
    static constexpr int kStep = 2 * kLanes;
    static __m512bh load_weight(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    static __m512bh load_weight(const bf16 *p, int n) { return (__m512bh)_mm512_maskz_loadu_epi16((1u << n) - 1, p); }
    static __m512bh load_x(const bf16 *p) { return (__m512bh)_mm512_load_si512(p); }
    static VecF multiply_add(__m512bh w, __m512bh x, VecF sum) { return _mm512_dpbf16_ps(sum, w, x); }
    // Rounds the elements of a step.
    static __m512bh round(VecF first, VecF second) { return _mm512_cvtne2ps_pbh(second, first); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct Steps<bf16> {
    using X = bf16;
    static constexpr int kStep = 2 * kLanes;
    static bfloat16x8_t load_weight(const bf16 *p) { return vld1q_bf16(reinterpret_cast<const bfloat16_t *>(p)); }
    static bfloat16x8_t load_weight(const bf16 *p, int n) {
        bfloat16x8_t weight = vreinterpretq_bf16_u16(vdupq_n_u16(0));
        std::memcpy(&weight, p, sizeof(bf16) * static_cast<size_t>(n));
        return weight;
    }
    static bfloat16x8_t load_x(const bf16 *p) { return load_weight(p); }
    static VecF multiply_add(bfloat16x8_t w, bfloat16x8_t x, VecF sum) {
        return (VecF)vbfdotq_f32((float32x4_t)sum, w, x);
    }
    static bfloat16x8_t round(VecF first, VecF second) {
        return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
    }
};
#endif

template <typename W> constexpr bool kInPairs = Steps<W>::kStep > kLanes;

} // namespace
} // namespace infini::INFINI_LEVEL
