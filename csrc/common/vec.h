// SIMD for the CPU kernels: VecF holds kLanes floats; load and store convert from and to float, bf16 and f16; load also
// converts from int8.
// Included only by *_cpu.cpp files, which are compiled once for every instruction set: everything is in an anonymous
// namespace inside the level's, so that the linker can never pick one level's copy of a function for another.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "torch_infini needs g++ >= 12 (or clang): older ones have no __builtin_shufflevector"
#endif

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "dtype.h"
#include "level.h"

namespace infini {
namespace INFINI_LEVEL {
namespace {

// ---- the vector types: GCC's and Clang's own, so + - * / and comparisons are built in ----

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

// Whether there are 32 vector registers instead of 16, which limits the accumulators of a register tile.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

inline VecF splat(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX2__)
    return _mm256_set1_ps(x);
#else
    return VecF{x, x, x, x};
#endif
}

// a * b + c, rounded once if the machine has FMA.
inline VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline VecF select(VecI mask, VecF yes, VecF no) {
    return (VecF)((mask & (VecI)yes) | (~mask & (VecI)no));
}

// If either argument is NaN, returns the second one. (NEON's maximum would return NaN, or the number.)
inline VecF max(VecF a, VecF b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return select(a > b, a, b);
#endif
}

inline VecF min(VecF a, VecF b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return select(a < b, a, b);
#endif
}

// ---- one value: rounds as the vector forms do ----

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// ---- bf16: the upper half of a float; rounds to nearest even, keeps NaN ----

inline VecF widen_bf16(VecH h) {
    // GCC 12 emits five instructions for the conversion even if the machine has one.
#if defined(__AVX512F__)
    return (VecF)((VecU)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
    return (VecF)((VecU)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#elif defined(__aarch64__)
    return (VecF)vshll_n_u16((uint16x4_t)h, 16);
#else
    return (VecF)(__builtin_convertvector(h, VecU) << 16);
#endif
}

inline VecH narrow_bf16(VecF x) {
#if defined(__AVX512BF16__)
    // Bit for bit as the code below. The instruction flushes denormals (below 1.2e-38) to zero, so they get the least
    // exponent while their mantissa is rounded: three instructions more, and no branch.
    const __mmask16 denormal = _mm512_testn_epi32_mask((__m512i)x, _mm512_set1_epi32(0x7f800000));
    const __m512i normal = _mm512_mask_or_epi32((__m512i)x, denormal, (__m512i)x, _mm512_set1_epi32(0x00800000));
    const auto rounded = (__m256i)_mm512_cvtneps_pbh((__m512)normal);
    return (VecH)_mm256_mask_sub_epi16(rounded, denormal, rounded, _mm256_set1_epi16(0x0080));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (VecH)vcvt_bf16_f32((float32x4_t)x); // bit for bit as the code below, denormals too
#else
    const VecU u = (VecU)x;
    const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const VecU nan = (u >> 16) | 0x40u;
#if defined(__AVX2__) && !defined(__AVX512F__)
    // GCC 12 emits seven instructions, not four, for the generic code below.
    const __m256 is_nan_of_x = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i value = (__m256i)_mm256_blendv_ps((__m256)rounded, (__m256)nan, is_nan_of_x);
    return (VecH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(value, value), 0xd8));
#else
    const VecU is_nan = (VecU)(x != x);
    return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), VecH);
#endif
#endif
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// sum + the products of two bf16 in each lane. BFDOT first adds the two products, then the sum, rounds both additions
// to odd (an error below 2^-23, twice FMA's) and flushes denormal operands and results to zero. BFMMLA adds in another
// order: a kernel that mixed them would give a row different bits in different calls.
inline VecF dot_bf16_pairs(VecF a, VecF b, VecF sum) {
    return (VecF)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)a),
                             vreinterpretq_bf16_f32((float32x4_t)b));
}
#endif

// ---- f16: in hardware, or by integer arithmetic where the baseline has none ----

inline VecF widen_f16(VecH h) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
    return _mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (VecF)vcvt_f32_f16((float16x4_t)h);
#else
    // Shift exponent and mantissa into place, then multiply by 2^112 to move the bias: exact, denormals included.
    const VecU u = __builtin_convertvector(h, VecU);
    const VecU magnitude = (u & 0x7fffu) << 13;
    const VecF scaled = (VecF)magnitude * splat(0x1p112f);
    const VecI special = (VecI)(magnitude >= 0x0f800000u); // infinity or NaN: the exponent is all ones
    const VecF value = select(special, (VecF)(magnitude | 0x7f800000u), scaled);
    return (VecF)((VecU)value | ((u & 0x8000u) << 16));
#endif
}

inline VecH narrow_f16(VecF x) {
#if defined(__AVX512F__)
    return (VecH)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (VecH)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (VecH)vcvt_f16_f32((float32x4_t)x);
#else
    const VecU u = (VecU)x;
    const VecU sign = (u >> 16) & 0x8000u;
    const VecU magnitude = u & 0x7fffffffu;
    // Normal results: move the bias, round the lowest 13 bits to nearest even; the carry may reach infinity.
    const VecU normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Results below 2^-14: adding 0.5 aligns the mantissa with float's last bit, so that the addition rounds.
    const VecU tiny = (VecU)((VecF)magnitude + splat(0.5f)) - 0x3f000000u;
    const VecU is_tiny = (VecU)(magnitude < 0x38800000u);
    const VecU is_large = (VecU)(magnitude >= 0x477ff000u); // rounds to 65536 or more: infinity
    const VecU is_nan = (VecU)(magnitude > 0x7f800000u);
    VecU half = (is_tiny & tiny) | (~is_tiny & normal);
    half = (is_large & 0x7c00u) | (~is_large & half);
    half = (is_nan & 0x7e00u) | (~is_nan & half);
    return __builtin_convertvector(half | sign, VecH);
#endif
}

// ---- load and store: all lanes, or the first n (the others read as 0 and are not written) ----

inline VecF load(const float *p) {
    VecF v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline VecF load(const bf16 *p) {
    VecH h;
    std::memcpy(&h, p, sizeof h);
    return widen_bf16(h);
}

inline VecF load(const f16 *p) {
    VecH h;
    std::memcpy(&h, p, sizeof h);
    return widen_f16(h);
}

inline VecF load(const int8_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#elif defined(__aarch64__)
    uint64_t bytes = 0;
    std::memcpy(&bytes, p, kLanes);
    return (VecF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))));
#else
    int8_t bytes __attribute__((vector_size(kLanes)));
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, VecI), VecF);
#endif
}

inline void store(float *p, VecF v) {
    std::memcpy(p, &v, sizeof v);
}

inline void store(bf16 *p, VecF v) {
    const VecH h = narrow_bf16(v);
    std::memcpy(p, &h, sizeof h);
}

inline void store(f16 *p, VecF v) {
    const VecH h = narrow_f16(v);
    std::memcpy(p, &h, sizeof h);
}

#if defined(__AVX512F__)

inline VecF load(const float *p, int n) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}

inline VecH load_halves(const void *p, int n) {
    return (VecH)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
}

inline void store(float *p, VecF v, int n) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
}

inline void store_halves(void *p, VecH h, int n) {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)h);
}

#else

inline VecF load(const float *p, int n) {
    VecF v = {};
    std::memcpy(&v, p, static_cast<size_t>(n) * 4);
    return v;
}

inline VecH load_halves(const void *p, int n) {
    VecH h = {};
    std::memcpy(&h, p, static_cast<size_t>(n) * 2);
    return h;
}

inline void store(float *p, VecF v, int n) {
    std::memcpy(p, &v, static_cast<size_t>(n) * 4);
}

inline void store_halves(void *p, VecH h, int n) {
    std::memcpy(p, &h, static_cast<size_t>(n) * 2);
}

#endif

inline VecF load(const bf16 *p, int n) {
    return widen_bf16(load_halves(p, n));
}

inline VecF load(const f16 *p, int n) {
    return widen_f16(load_halves(p, n));
}

inline VecF load(const int8_t *p, int n) {
    int8_t bytes[kLanes] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return load(bytes);
}

inline void store(bf16 *p, VecF v, int n) {
    store_halves(p, narrow_bf16(v), n);
}

inline void store(f16 *p, VecF v, int n) {
    store_halves(p, narrow_f16(v), n);
}

// ---- one value and one rounding ----

inline float widen(float x) {
    return x;
}

inline float widen(bf16 x) {
    return float_of(static_cast<uint32_t>(x.bits) << 16);
}

inline float widen(f16 x) {
#if defined(__AVX2__)
    return _cvtsh_ss(x.bits);
#else
    return load(&x, 1)[0];
#endif
}

// Rounds x to T and converts back.
template <typename T> inline VecF round_to(VecF x);

template <> inline VecF round_to<float>(VecF x) {
    return x;
}

template <> inline VecF round_to<bf16>(VecF x) {
    return widen_bf16(narrow_bf16(x));
}

template <> inline VecF round_to<f16>(VecF x) {
    return widen_f16(narrow_f16(x));
}

// ---- across the lanes: always in the same order, so the same input gives the same bits ----

inline float sum(VecF v) {
#if defined(__aarch64__)
    const float32x2_t pairs = vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v));
    return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
#else
    float lanes[kLanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            lanes[i] += lanes[i + half];
        }
    }
    return lanes[0];
#endif
}

template <int kHalf, typename V, int... kLane> inline V add_halves(V a, V b, std::integer_sequence<int, kLane...>) {
    // In blocks of 2 * kHalf lanes, a's lower half and b's upper half stay in place; the other two halves are swapped.
    return __builtin_shufflevector(a, b, (kLane & kHalf ? kLane + kLanes : kLane)...) +
           __builtin_shufflevector(a, b, (kLane & kHalf ? kLane - kHalf + kLanes : kLane + kHalf)...);
}

// Lane i is sum(v(i)), bit for bit: kLanes sums for the price of a few. For floats and integers.
template <int kHalf = 1, typename Vectors> inline auto sums(const Vectors &v, int first = 0) {
    constexpr std::make_integer_sequence<int, kLanes> all{};
    if constexpr (kHalf == kLanes / 2) {
        return add_halves<kHalf>(v(first), v(first + kHalf), all);
    } else {
        return add_halves<kHalf>(sums<kHalf * 2>(v, first), sums<kHalf * 2>(v, first + kHalf), all);
    }
}

inline float max(VecF v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float lanes[kLanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
        }
    }
    return lanes[0];
#endif
}

// Stops the compiler from reloading a value for each use: register tiles are bound by loads.
template <typename Register> __attribute__((always_inline)) inline void keep_in_register(Register &value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    (void)value;
#endif
}

// ---- functions ----

// e^x to within 2 ulp, for results from the denormals up to infinity; keeps NaN.
#if defined(__AVX512F__)

inline VecF exp(VecF x) {
    const VecF clamped = min(splat(89.0f), max(splat(-105.0f), x));
    const VecF n = _mm512_roundscale_ps(clamped * splat(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    VecF f = fma(clamped, splat(1.44269504f), -n);
    f = fma(clamped, splat(1.92596303e-8f), f); // the rounding error of log2(e) as a float
    VecF p = splat(1.5353362e-4f);              // 2^f for |f| <= 1/2, relative error 2e-9
    p = fma(p, f, splat(1.3398875e-3f));
    p = fma(p, f, splat(9.6184369e-3f));
    p = fma(p, f, splat(5.5503324e-2f));
    p = fma(p, f, splat(2.4022648e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    return _mm512_scalef_ps(p, n);
}

// e^x for x <= 0 as a float, plus its rounding error `rest`; the sum is within 0.3 ulp of the float.
inline VecF exp_and_rest(VecF x, VecF &rest) {
    const VecF clamped = max(splat(-105.0f), x);
    const VecF t = clamped * splat(1.44269504f);
    const VecF n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const VecF f = t - n; // exact
    const VecF rest_of_t = fma(clamped, splat(1.92596303e-8f), fma(clamped, splat(1.44269504f), -t));
    VecF p = splat(1.5353362e-4f); // as in exp()
    p = fma(p, f, splat(1.3398875e-3f));
    p = fma(p, f, splat(9.6184369e-3f));
    p = fma(p, f, splat(5.5503324e-2f));
    p = fma(p, f, splat(2.4022648e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    const VecF e = fma(p, f, splat(1.0f));
    rest = _mm512_scalef_ps(fma(rest_of_t, splat(6.9314718e-1f) * e, fma(p, f, splat(1.0f) - e)), n);
    return _mm512_scalef_ps(e, n);
}

// e^x for a result that is rounded to T. Less precise for half types: the relative error is 2e-7 * (1 + |x|).
template <typename T> inline VecF exp_for(VecF x) {
    const VecF t = x * splat(1.44269504f);
    // t minus its floor, which scalef adds to the exponent; 0 at infinity.
    const VecF f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    VecF p = splat(1.8775767e-3f); // 2^f for 0 <= f < 1, relative error 1e-7
    p = fma(p, f, splat(8.9893397e-3f));
    p = fma(p, f, splat(5.5826318e-2f));
    p = fma(p, f, splat(2.4015361e-1f));
    p = fma(p, f, splat(6.9315308e-1f));
    p = fma(p, f, splat(9.9999994e-1f));
    return _mm512_scalef_ps(p, t);
}

template <> inline VecF exp_for<float>(VecF x) {
    return exp(x);
}

#else // AVX2, NEON and baseline

// x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (Cephes), and n added to the exponent in two steps, so that
// results range from the denormals to infinity.
inline VecF exp(VecF x) {
    // The clamp also keeps the conversion to int in range. This order of arguments keeps NaN.
    const VecF clamped = min(splat(89.0f), max(splat(-104.0f), x));
    const VecF shifted = fma(clamped, splat(1.44269504088896341f), splat(0x1.8p23f));
    const VecF n = shifted - splat(0x1.8p23f); // rounded to an integer by the addition
    VecF r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    VecF p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + splat(1.0f);
    const VecI whole = __builtin_convertvector(n, VecI);
    const VecI first = whole >> 1;
    const VecF low = (VecF)((first + 127) << 23), high = (VecF)((whole - first + 127) << 23);
    return p * low * high;
}

// e^x for x <= 0 as a float, plus its rounding error `rest`; the sum is within 0.3 ulp of the float.
inline VecF exp_and_rest(VecF x, VecF &rest) {
    const VecF clamped = max(splat(-104.0f), x);
    const VecF n = fma(clamped, splat(1.44269504088896341f), splat(0x1.8p23f)) - splat(0x1.8p23f);
    const VecF exact = fma(n, splat(-0.693359375f), clamped), small = n * splat(2.12194440e-4f);
    const VecF r = exact + small;
    VecF p = splat(1.9875691500e-4f); // as in exp()
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r);
    const VecF e = p + splat(1.0f);
    const VecI whole = __builtin_convertvector(n, VecI);
    const VecI first = whole >> 1;
    const VecF low = (VecF)((first + 127) << 23), high = (VecF)((whole - first + 127) << 23);
    rest = fma(small - (r - exact), e, p - (e - splat(1.0f))) * low * high;
    return e * low * high;
}

template <typename T> inline VecF exp_for(VecF x) {
    return exp(x);
}

#endif

// a / b for a result that is rounded to T. On a CPU nothing is cheaper than the division.
template <typename T> inline VecF quotient_for(VecF a, VecF b) {
    return a / b;
}

// 1 / (1 + e^-x); no overflow for any x.
inline VecF sigmoid(VecF x) {
    return splat(1.0f) / (splat(1.0f) + exp(-x));
}

inline VecF abs(VecF x) {
    return (VecF)((VecI)x & 0x7fffffff);
}

// x with the last 12 bits cleared, so that its square is exact.
inline VecF leading_bits(VecF x) {
    return (VecF)((VecU)x & 0xfffff000u);
}

// tanh x for a result that is rounded to T, computed in float to within 3 ulp; keeps NaN. Near 0 it is a minimax
// polynomial x + x^3 P(x^2) of relative error 2e-8; elsewhere it uses the exponential.
template <typename T> inline VecF tanh_for(VecF x) {
    const VecF magnitude = abs(x), u = x * x;
    VecF p = splat(-6.09695752e-3f);
    p = fma(p, u, splat(2.09973716e-2f));
    p = fma(p, u, splat(-5.38509576e-2f));
    p = fma(p, u, splat(1.33327701e-1f));
    p = fma(p, u, splat(-3.33333289e-1f));
    const VecF near = fma(p * u, x, x);
    const VecF far = splat(1.0f) - splat(2.0f) / (exp_for<T>(magnitude + magnitude) + splat(1.0f));
    const VecF value = select(magnitude < splat(0.625f), near, far);
    return (VecF)((VecI)value | ((VecI)x & INT32_MIN)); // restores the sign near -0, where the sum above is 0
}

// The lane count that for_each_vector passes for a full vector: a compile-time constant, so that load_at(p, i, n) needs
// no mask.
struct Full {
    constexpr operator int() const { return kLanes; }
};

template <typename T> inline VecF load_at(const T *p, int64_t i, Full) {
    return load(p + i);
}

template <typename T> inline VecF load_at(const T *p, int64_t i, int n) {
    return load(p + i, n);
}

template <typename T> inline void store_at(T *p, int64_t i, VecF v, Full) {
    store(p + i, v);
}

template <typename T> inline void store_at(T *p, int64_t i, VecF v, int n) {
    store(p + i, v, n);
}

// v with the lanes from n on replaced by `rest`.
inline VecF first_lanes(VecF v, Full, float) {
    return v;
}

inline VecF first_lanes(VecF v, int n, float rest) {
    VecI lane;
    for (int i = 0; i < kLanes; ++i) {
        lane[i] = i;
    }
    return select(lane < n, v, splat(rest));
}

// Calls body(i, n) along a row: n is Full{} for full vectors, an int for the last one.
template <typename Body> inline void for_each_vector(int64_t size, const Body &body) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        body(i, Full{});
    }
    if (i < size) {
        body(i, static_cast<int>(size - i));
    }
}

// Calls body(T{}) with the C++ type of a floating dtype; the checks refuse all others.
template <typename Body> inline void with_float_type(infiniDtype_t dtype, const Body &body) {
    if (dtype == INFINI_DTYPE_BF16) {
        body(bf16{});
    } else if (dtype == INFINI_DTYPE_F16) {
        body(f16{});
    } else {
        body(float{});
    }
}

} // namespace
} // namespace INFINI_LEVEL
} // namespace infini
