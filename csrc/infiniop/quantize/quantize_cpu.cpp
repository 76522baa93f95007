// The CPU kernels of quantize_int8 and quantize_int4. Each row, or some groups of it, is read twice: for the extremes,
// then (from the cache) for the integers. Limit: one division per element (AVX-512: 16 in about 9 cycles), close to the
// time of reading weights from memory.
#include "quantize.h"

#include "parallel.h"
#include "quantize_row.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using quantize::Args;

// Stores x rounded to T; returns what was stored.
template <typename T> VecF store_rounded(T *p, VecF x, int n) {
    store(p, x, n);
    return round_to<T>(x);
}

// Stores two lanes, each below 16, in one byte.
inline void store_nibbles(uint8_t *p, VecI value) {
    typedef uint64_t VecL __attribute__((vector_size(kLanes * 4)));
    const VecL pairs = (VecL)value | (VecL)value >> 28;
#if defined(__AVX512F__)
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm512_cvtepi64_epi8((__m512i)pairs));
#else
    for (int i = 0; i < kLanes / 2; ++i) {
        p[i] = static_cast<uint8_t>(pairs[i]);
    }
#endif
}

// Handles kLanes groups at a time: their extremes one by one, scales and zeros of all at once.
template <typename T> class Int4Row {
public:
    explicit Int4Row(int64_t group_size) : group_size_(group_size) {}

    void quantize(const T *w, int64_t groups, uint8_t *q, T *scales, T *zeros) const {
        for (int64_t g = 0; g < groups; g += kLanes) {
            const int count = groups - g < kLanes ? static_cast<int>(groups - g) : kLanes;
            quantize_some(w + g * group_size_, count, q + g * group_size_ / 2, scales + g, zeros + g);
        }
    }

private:
    void quantize_some(const T *w, int count, uint8_t *q, T *scales, T *zeros) const {
        float lows[kLanes] = {}, highs[kLanes] = {};
        for (int g = 0; g < count; ++g) {
            find_extremes(w + g * group_size_, lows[g], highs[g]);
        }
        const VecF least = load(lows), most = load(highs);
        const VecF scale = store_rounded(scales, most / splat(15) - least / splat(15), count);
        const VecF zero = store_rounded(zeros, least + splat(8) * scale, count);
        for (int g = 0; g < count; ++g) {
            const VecF divisor = splat(scale[g] > 0 ? scale[g] : 1), middle = splat(zero[g]);
            for (int64_t i = g * group_size_; i < (g + 1) * group_size_; i += kLanes) {
                // If x is NaN, max returns its second argument.
                const VecF steps = min(splat(7), max((load(w + i) - middle) / divisor, splat(-8)));
                store_nibbles(q + i / 2, nearest(steps) + 8);
            }
        }
    }

    // Both become NaN if the group holds infinity or NaN.
    void find_extremes(const T *w, float &least, float &most) const {
        VecF low = load(w), high = low, poison = low * splat(0);
        for (int64_t i = kLanes; i < group_size_; i += kLanes) {
            const VecF x = load(w + i);
            low = min(x, low);
            high = max(x, high);
            poison = fma(x, splat(0), poison);
        }
        // NaN in some lane, or else 0 in all.
        const float nothing = sum(poison);
        least = -max(-low) + nothing;
        most = max(high) + nothing;
    }

    const int64_t group_size_;
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantize::INFINI_LEVEL::int8_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const TensorView &weight = args.weight, &q = args.q;
    const int64_t n = weight.size(0), k = weight.size(1);
    with_float_type(weight.dtype, [&](auto type) {
        using T = decltype(type);
        const int64_t bytes = n * k * static_cast<int64_t>(sizeof(T) + 1);
        parallel_for(
            n, bytes,
            [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                    args.scales.as<float>()[row * args.scales.stride(0)] = quantize_row(
                        weight.as<const T>() + row * weight.stride(0), k, q.as<int8_t>() + row * q.stride(0));
                }
            },
            kParallelBytes);
    });
}

void infini::quantize::INFINI_LEVEL::int4_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const TensorView &weight = args.weight, &q = args.q, &scales = args.scales, &zeros = args.zeros;
    const int64_t n = weight.size(0), k = weight.size(1);
    with_float_type(weight.dtype, [&](auto type) {
        using T = decltype(type);
        const Int4Row<T> quantizer(args.group_size);
        const int64_t bytes = n * k * static_cast<int64_t>(sizeof(T)) + n * k / 2;
        parallel_for(
            n, bytes,
            [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                    quantizer.quantize(weight.as<const T>() + row * weight.stride(0), scales.size(1),
                                       q.as<uint8_t>() + row * q.stride(0), scales.as<T>() + row * scales.stride(0),
                                       zeros.as<T>() + row * zeros.stride(0));
                }
            },
            kParallelBytes);
    });
}
