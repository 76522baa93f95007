// Scores of a few rows (decode): dot products along the head size, with K read in place.
#pragma once

#include "register_tiles.h"

namespace infini::INFINI_LEVEL {
namespace {

struct Whole { // as a number of elements: more than any vector has
    constexpr operator int64_t() const { return 64; }
};

// kRows rows of q with all keys, kLanes products at a time.
template <int kRows, typename P, typename T>
void dot_rows(const P *q, int64_t q_stride, const T *const *k, int64_t keys, int64_t n, float *scores,
              KvPrefetcher<T> &ahead) {
    constexpr int kKeys = kLanes / kRows;
    constexpr int64_t step = kLanes * kElements<P>;
    for (int64_t key = 0; key < keys; key += kKeys) {
        VecF products[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            products[i] = VecF{};
        }
        // `rest` is a constant for whole vectors: a masked load takes longer.
        const auto add = [&](int64_t c, auto rest) __attribute__((always_inline)) {
            if (key % KvPrefetcher<T>::kStreams == 0 && c * static_cast<int64_t>(sizeof(T)) % kLineBytes == 0) {
                for (int64_t i = 0; i < kKeys; i += KvPrefetcher<T>::kStreams) {
                    ahead.fetch();
                }
            }
            VecF left[kRows];
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                std::memcpy(&left[r], q + r * q_stride + c / kElements<P>, sizeof left[r]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < kKeys; ++i) {
                const VecF right = load_packed(q, k[key + i] + c, rest);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    products[r * kKeys + i] = multiply_add(left[r], right, products[r * kKeys + i], q);
                }
            }
        };
        int64_t c = 0;
        if constexpr (sizeof(T) == 1) { // no gain for wider types, which wait for memory
            for (; c + 4 * step <= n; c += 4 * step) {
                add(c, Whole{});
                add(c + step, Whole{});
                add(c + 2 * step, Whole{});
                add(c + 3 * step, Whole{});
            }
        }
        for (; c + step <= n; c += step) {
            add(c, Whole{});
        }
        if (c < n) {
            add(c, n - c);
        }
        const auto sum = sums([&](int i) { return summands(products[i], q); });
        const VecF totals = __builtin_convertvector(sum, VecF);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(scores + r * kKeyBlock + key, reinterpret_cast<const char *>(&totals) + r * kKeys * 4,
                        kKeys * 4);
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
