/* The vector peak of one core: independent multiply-adds on registers only, nothing loaded or stored.
 * c_abi.py compiles it for the machine at hand; products are held against it. Each returns operations a second. */
#define _POSIX_C_SOURCE 199309L
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 Vec;
#define SET(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
typedef __m256 Vec;
#define SET(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
typedef float Vec __attribute__((vector_size(16)));
#define SET(x) ((Vec){x, x, x, x})
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

enum { kChains = 12, kSteps = 100000 };

static volatile float sink;

double f32_peak(double seconds) {
    Vec sum[kChains], a = SET(0.999f), b = SET(1e-3f);
    double best = 0;
    const double end = now() + seconds;
    int i, step;
    for (i = 0; i < kChains; ++i) {
        sum[i] = SET((float)i);
    }
    do {
        const double start = now();
        for (step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
            for (i = 0; i < kChains; ++i) {
                sum[i] = FMA(sum[i], a, b);
            }
        }
        const double rate = 2.0 * kSteps * kChains * (sizeof(Vec) / sizeof(float)) / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    for (i = 1; i < kChains; ++i) {
        sum[0] = FMA(sum[i], a, sum[0]);
    }
    sink = ((float *)&sum[0])[0];
    return best;
}

/* 0 where the machine has no such instruction; so the next one. */
double bf16_peak(double seconds) {
#if defined(__AVX512BF16__)
    __m512 sum[kChains];
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00), b = (__m512bh)_mm512_set1_epi16(0x3c10);
    double best = 0;
    const double end = now() + seconds;
    int i, step;
    for (i = 0; i < kChains; ++i) {
        sum[i] = _mm512_set1_ps((float)i);
    }
    do {
        const double start = now();
        for (step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
            for (i = 0; i < kChains; ++i) {
                sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
            }
        }
        const double rate = 2.0 * kSteps * kChains * 32 / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    for (i = 1; i < kChains; ++i) {
        sum[0] = _mm512_add_ps(sum[i], sum[0]);
    }
    sink = ((float *)&sum[0])[0];
    return best;
#else
    (void)seconds;
    return 0;
#endif
}

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;
#define SET_BYTES(x) _mm512_set1_epi8(x)
#define DOT(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#elif defined(__AVXVNNI__)
typedef __m256i Bytes;
#define SET_BYTES(x) _mm256_set1_epi8(x)
#define DOT(sum, a, b) _mm256_dpbusd_avx_epi32(sum, a, b)
#endif

/* Products of bytes summed in 32 bits. */
double int8_peak(double seconds) {
#if defined(DOT)
    Bytes sum[kChains], a = SET_BYTES(3), b = SET_BYTES(-5);
    double best = 0;
    const double end = now() + seconds;
    int i, step;
    for (i = 0; i < kChains; ++i) {
        sum[i] = SET_BYTES(i);
    }
    do {
        const double start = now();
        for (step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
            for (i = 0; i < kChains; ++i) {
                sum[i] = DOT(sum[i], a, b);
            }
        }
        const double rate = 2.0 * kSteps * kChains * sizeof(Bytes) / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    for (i = 1; i < kChains; ++i) {
        sum[0] += sum[i];
    }
    sink = (float)sum[0][0];
    return best;
#else
    (void)seconds;
    return 0;
#endif
}
