// The CPU kernel of add_lora, in two passes: h = x a^T in float, then y += h b. Limit for few rows: memory bandwidth,
// a and b of each row's adapter read once. The index has been checked.
#include "add_lora.h"
#include "indices.h"
#include "level_types.h"
#include "parallel.h"
#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kDots = 4;      // rows of a that share a load of x: eight sums hide the latency of fma
constexpr int64_t kColumns = 512; // of y, that one thread takes at a time
constexpr int kVectors = 8;       // of y, in registers while all rows of b are added

// h[i] = x . a[i] for kRows rows of a. The order of a sum depends on k alone.
template <int kRows, typename T> void dots(float *h, const T *x, const T *a, int64_t stride, int64_t k) {
    VecF even[kRows] = {}, odd[kRows] = {};
    int64_t at = 0;
    for (; at + 2 * kLanes <= k; at += 2 * kLanes) {
        const VecF first = load(x + at), second = load(x + at + kLanes);
        for (int i = 0; i < kRows; ++i) {
            even[i] = fma(first, load(a + i * stride + at), even[i]);
            odd[i] = fma(second, load(a + i * stride + at + kLanes), odd[i]);
        }
    }
    for_each_vector(k - at, [&](int64_t j, auto lanes) {
        const VecF value = load_at(x, at + j, lanes);
        for (int i = 0; i < kRows; ++i) {
            even[i] = fma(value, load_at(a + i * stride, at + j, lanes), even[i]);
        }
    });
    for (int i = 0; i < kRows; ++i) {
        h[i] = sum(even[i] + odd[i]);
    }
}

// y += h b for kCount vectors of y; `lanes` of the last.
template <int kCount, typename T, typename Lanes>
void add_rows(T *y, const float *h, const T *b, int64_t stride, int64_t rank, Lanes lanes) {
    VecF sums[kCount];
    for (int v = 0; v < kCount; ++v) {
        sums[v] = load_at(y, v * kLanes, lanes);
    }
    for (int64_t j = 0; j < rank; ++j) {
        const VecF factor = splat(h[j]);
        for (int v = 0; v < kCount; ++v) {
            sums[v] = fma(factor, load_at(b + j * stride, v * kLanes, lanes), sums[v]);
        }
    }
    for (int v = 0; v < kCount; ++v) {
        store_at(y, v * kLanes, sums[v], lanes);
    }
}

template <typename T> void add_adapters(const add_lora::Args &args) {
    const int64_t tokens = args.x.size(0), k = args.x.size(1), n = args.y.size(1), rank = args.a.size(1);
    const Indices index(args.index);
    const auto *const x = args.x.as<const T>(), *const a = args.a.as<const T>(), *const b = args.b.as<const T>();
    auto *const y = args.y.as<T>();
    const int64_t a_stride = args.a.stride(1), b_stride = args.b.stride(1);
    auto *const h = static_cast<float *>(cpu::scratch(static_cast<size_t>(tokens * rank + 1) * sizeof(float)));

    // Rows are split, too, so that a decode step of one token has work for every thread.
    const int64_t groups = (rank + kDots - 1) / kDots, blocks = (n + kColumns - 1) / kColumns;
    const auto size = static_cast<int64_t>(sizeof(T));
    parallel_for(tokens * groups, tokens * rank * k * size, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t t = at / groups, first = at % groups * kDots, slot = index[t];
            if (slot < 0) {
                continue;
            }
            const T *row = x + t * args.x.stride(0), *of = a + slot * args.a.stride(0) + first * a_stride;
            float *const out = h + t * rank + first;
            if (first + kDots <= rank) {
                dots<kDots>(out, row, of, a_stride, k);
            } else {
                for (int64_t i = 0; first + i < rank; ++i) {
                    dots<1>(out + i, row, of + i * a_stride, a_stride, k);
                }
            }
        }
    });
    parallel_for(tokens * blocks, tokens * rank * n * size, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t t = at / blocks, slot = index[t];
            if (slot < 0) {
                continue;
            }
            int64_t column = at % blocks * kColumns;
            const int64_t last = column + kColumns < n ? column + kColumns : n;
            T *const row = y + t * args.y.stride(0);
            const T *const of = b + slot * args.b.stride(0);
            const float *const factors = h + t * rank;
            for (; column + kVectors * kLanes <= last; column += kVectors * kLanes) {
                add_rows<kVectors>(row + column, factors, of + column, b_stride, rank, Full{});
            }
            for_each_vector(last - column, [&](int64_t i, auto lanes) {
                add_rows<1>(row + column + i, factors, of + column + i, b_stride, rank, lanes);
            });
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::add_lora::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                          [&](auto x) { add_adapters<decltype(x)>(args); });
}
