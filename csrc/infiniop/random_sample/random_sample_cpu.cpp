// The CPU kernel of random_sample, without a sort. A pass finds the maximum. A histogram of the weights (for top-k, a
// lower bound of the k-th value) leaves few candidates. A radix selection finds where their running sum reaches the
// limit.
// Limit: memory bandwidth if only the first maximum is needed; one exponential per logit if all weights are summed.
#include "indices.h"
#include "level_types.h"
#include "parallel.h"
#include "philox.h"
#include "random_sample.h"
#include "vec.h"

#include <cmath>
#include <limits>

#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

using random_sample::Args;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row costs up to 0.5 ns per byte, so a second thread pays off from less traffic on than in other ops.
constexpr int64_t kParallelSampleBytes = 64 * 1024;

// Vectors per group that has a common maximum, without top-k.
constexpr int64_t kGroup = 64;

// Maxima to keep per token of top-k: with 8, about 7 % more candidates than needed pass the bound.
constexpr int64_t kMaximaPerToken = 8;

// The histogram over (max - x) / temperature; the last bucket takes all distances from 64 on (weights below 2e-28).
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 16.0f;

// Bit i is set if lane i of the comparison is true.
inline uint32_t lanes_of(VecI mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)((VecU)mask & VecU{1, 2, 4, 8}));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) {
        bits |= static_cast<uint32_t>(mask[i] & 1) << i;
    }
    return bits;
#endif
}

inline uint32_t first_lanes(Full) {
    return ~uint32_t{0};
}

inline uint32_t first_lanes(int n) {
    return (uint32_t{1} << n) - 1;
}

// Loads a vector with `fill` in the lanes from n on.
template <typename T> inline VecF load_or(const T *p, int64_t i, Full lanes, float) {
    return load_at(p, i, lanes);
}

template <typename T> inline VecF load_or(const T *p, int64_t i, int n, float fill) {
    float values[kLanes];
    const VecF v = load_at(p, i, n);
    std::memcpy(values, &v, sizeof v);
    for (int lane = n; lane < kLanes; ++lane) {
        values[lane] = fill;
    }
    return load(values);
}

// Maps floats to unsigned integers in the same order; -0 and 0 are equal.
inline VecU key_of(VecF x) {
    const VecU bits = (VecU)(x + splat(0.0f));
    return bits ^ ((VecU)((VecI)bits >> 31) | 0x80000000u);
}

inline float value_of(uint32_t key) {
    return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// One row's weights: exp(-distance), where distance = (max - x) / temperature; monotonic in x.
struct Weights {
    VecF max, inverse;

    Weights(float top, float temperature)
        : max(splat(top)),
          // Bounded so that its product with 0 or infinity is not NaN.
          inverse(splat(std::fmin(std::fmax(1.0f / temperature, std::numeric_limits<float>::min()),
                                  std::numeric_limits<float>::max()))) {}

    VecF distance(VecF x) const { return (max - x) * inverse; }
    VecF weight(VecF distance) const { return exp(-distance); }
    VecI bucket(VecF distance) const {
        return __builtin_convertvector(min(distance * splat(kBucketsPerUnit), splat(kBuckets - 1)), VecI);
    }
};

// A thread's scratch. Candidates are ordered by column, so among equal values the first column comes first.
struct Buffers {
    float *maxima;     // per lane, for each group of vectors
    uint32_t *keys;    // of the candidates; before that their values, or the keys of the maxima
    uint32_t *columns; // of the candidates
    float *weights;    // of the candidates

    explicit Buffers(int64_t n) {
        const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
        maxima = static_cast<float *>(cpu::scratch(static_cast<size_t>(padded) * 16));
        keys = reinterpret_cast<uint32_t *>(maxima + padded);
        columns = keys + padded;
        weights = reinterpret_cast<float *>(columns + padded);
    }
};

// Finds where the running sum of weight(i), in descending order of the keys, reaches the limit: returns the key there
// and subtracts the weights above it from the limit. Each round splits the range of keys into 256 parts and keeps one.
// Keys without weight are never chosen.
template <typename Weight>
uint32_t select_key(const uint32_t *keys, int64_t count, const Weight &weight, double &limit) {
    uint32_t low = ~uint32_t{0}, high = 0;
    for (int64_t i = 0; i < count; ++i) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    while (low < high) {
        const uint32_t range = high - low;
        const int width = 32 - __builtin_clz(range), shift = width > 8 ? width - 8 : 0;
        double sums[256] = {};
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t below = high - keys[i]; // keys above the range wrap to large numbers
            if (below <= range) {
                sums[below >> shift] += weight(i);
            }
        }
        uint32_t part = 0;
        double reached = 0, above = 0;
        for (uint32_t i = 0; i < 256 && (i == 0 || reached < limit || reached == 0); ++i) {
            if (sums[i] > 0) { // falls back to the last of these if rounding keeps the sum below the limit
                part = i;
                above = reached;
                reached += sums[i];
            }
        }
        limit -= above;
        high -= part << shift;
        const uint32_t last = (uint32_t{1} << shift) - 1;
        low = high - low > last ? high - last : low;
    }
    return high;
}

// The column where the running sum of the candidates' weights reaches the limit.
int64_t select_column(const Buffers &b, int64_t count, double limit) {
    const uint32_t key = select_key(b.keys, count, [&](int64_t i) { return b.weights[i]; }, limit);
    int64_t column = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (b.keys[i] == key) {
            column = b.columns[i];
            limit -= b.weights[i];
            if (limit <= 0) {
                break;
            }
        }
    }
    return column;
}

// Makes the columns that pass test(x) candidates; stores their values in place of the keys.
template <typename T, typename Test> int64_t collect(const T *x, int64_t n, const Buffers &b, const Test &test) {
    int64_t count = 0;
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF v = load_at(x, i, lanes);
        for (uint32_t left = lanes_of(test(v)) & first_lanes(lanes); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            b.keys[count] = bits_of(v[lane]);
            b.columns[count] = static_cast<uint32_t>(i + lane);
            ++count;
        }
    });
    return count;
}

// Computes the candidates' weights and keys from their values.
void weigh(const Buffers &b, int64_t count, const Weights &weights) {
    for_each_vector(count, [&](int64_t i, auto lanes) {
        auto *values = reinterpret_cast<float *>(b.keys);
        const VecF x = load_at(values, i, lanes);
        store_at(b.weights, i, weights.weight(weights.distance(x)), lanes);
        store_at(values, i, (VecF)key_of(x), lanes);
    });
}

// Keeps the k largest candidates; among equal ones those in the lower columns.
void keep_largest(const Buffers &b, int64_t count, int64_t k) {
    auto equal = static_cast<double>(k);
    const uint32_t smallest = select_key(b.keys, count, [](int64_t) { return 1.0; }, equal);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (b.keys[i] > smallest || (b.keys[i] == smallest && equal-- > 0)) {
            b.keys[kept] = b.keys[i];
            b.columns[kept] = b.columns[i];
            b.weights[kept] = b.weights[i];
            ++kept;
        }
    }
}

// The sum of all weights: partial sums of a few vectors in float, their sum in double.
template <typename T> double sum_of_weights(const T *x, int64_t n, const Weights &weights) {
    constexpr int64_t kChunk = 32 * kLanes;
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        VecF part = {};
        for_each_vector(n - begin < kChunk ? n - begin : kChunk, [&](int64_t i, auto lanes) {
            part = part + weights.weight(weights.distance(load_or(x + begin, i, lanes, -kInfinity)));
        });
        total += sum(part);
    }
    return total;
}

// Sums the weights in each bucket. The weights and buckets of a chunk are stored before they are added one by one:
// loading a single lane right after the store of its vector would stall.
template <typename T> void fill_histogram(const T *x, int64_t n, const Weights &weights, double *sums) {
    constexpr int64_t kChunk = 1024;
    float weight[kChunk];
    int32_t bucket[kChunk];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t size = n - begin < kChunk ? n - begin : kChunk;
        for_each_vector(size, [&](int64_t i, auto lanes) {
            const VecF distance = weights.distance(load_at(x + begin, i, lanes));
            const VecI buckets = weights.bucket(distance);
            store(weight + i, weights.weight(distance)); // lanes beyond the row have room and are not read
            std::memcpy(bucket + i, &buckets, sizeof buckets);
        });
        for (int64_t i = 0; i < size; ++i) {
            sums[bucket[i]] += weight[i];
        }
    }
}

struct Settings {
    float temperature;
    int64_t top_k;
    float top_p;
    float u;
};

// Returns the largest value, and stores in b.maxima [groups * kLanes] the maxima of each lane over groups of vectors.
// Returns NaN if there is a NaN or +infinity.
template <typename T> float maximum(const T *x, int64_t n, int64_t group, const Buffers &b) {
    VecF top = splat(-kInfinity);
    VecI good = (VecI)(top == top);
    float *maxima = b.maxima;
    for (int64_t begin = 0; begin < n; begin += group * kLanes) {
        VecF group_max = splat(-kInfinity);
        for_each_vector(n - begin < group * kLanes ? n - begin : group * kLanes, [&](int64_t i, auto lanes) {
            const VecF v = load_or(x + begin, i, lanes, -kInfinity);
            good &= v < splat(kInfinity);
            group_max = max(group_max, v);
        });
        store(maxima, group_max);
        maxima += kLanes;
        top = max(top, group_max);
    }
    const uint32_t all = lanes_of((VecI)(splat(0) == splat(0)));
    return lanes_of(good) == all ? max(top) : std::numeric_limits<float>::quiet_NaN();
}

// The first column whose value is `top`, from the first group that has it.
template <typename T> int64_t first_maximum(const T *x, int64_t n, int64_t group, const Buffers &b, float top) {
    int64_t i = 0;
    while (b.maxima[i] != top) {
        ++i;
    }
    int64_t column = i / kLanes * group * kLanes;
    while (column < n - 1 && widen(x[column]) != top) {
        ++column;
    }
    return column;
}

// The error code in place of a token; see random_sample.h.
template <typename T> int64_t refusal(const T *x, int64_t n) {
    int64_t column = 0;
    while (column < n && widen(x[column]) < kInfinity) {
        ++column;
    }
    return -1 - column;
}

template <typename T> int64_t sample_row(const T *x, int64_t n, const Settings &s, const Buffers &b) {
    const bool greedy = s.temperature == 0 || s.top_k == 1 || s.top_p == 0;
    const bool limited = !greedy && s.top_k > 0 && s.top_k < n;
    // Top-k: keep at least as many maxima as tokens are wanted, so that the k-th largest maximum is a lower bound of
    // the k-th value. If that would keep nearly all values, every column is a candidate.
    const int64_t vectors = (n + kLanes - 1) / kLanes;
    const int64_t groups = limited ? (s.top_k * kMaximaPerToken + kLanes - 1) / kLanes : 0;
    const bool bounded = groups > 0 && groups * 2 <= vectors;
    const int64_t group = bounded ? vectors / groups : kGroup;
    const float top = maximum(x, n, group, b);
    if (!(top > -kInfinity)) {
        return refusal(x, n);
    }
    if (greedy) {
        return first_maximum(x, n, group, b, top);
    }
    const Weights weights(top, s.temperature);
    const double p = s.top_p < 1 ? s.top_p : 1;
    if (limited) {
        VecF bound = splat(-kInfinity);
        if (bounded) {
            const int64_t maxima = (vectors + group - 1) / group * kLanes;
            for (int64_t i = 0; i < maxima; i += kLanes) {
                store(reinterpret_cast<float *>(b.keys) + i, (VecF)key_of(load(b.maxima + i)));
            }
            auto k = static_cast<double>(s.top_k);
            bound = splat(value_of(select_key(b.keys, maxima, [](int64_t) { return 1.0; }, k)));
        }
        const int64_t count = collect(x, n, b, [&](VecF v) { return v >= bound; });
        weigh(b, count, weights);
        keep_largest(b, count, s.top_k);
        double total = 0;
        for (int64_t i = 0; i < s.top_k; ++i) {
            total += b.weights[i];
        }
        if (p < 1) {
            total = std::fmin(total, p * sum_of_weights(x, n, weights));
        }
        return select_column(b, s.top_k, s.u * total);
    }
    double sums[kBuckets] = {};
    fill_histogram(x, n, weights, sums);
    double total = 0;
    for (const double sum : sums) {
        total += sum;
    }
    // The bucket that contains the limit, found as in select_key.
    double limit = s.u * p * total;
    int bucket = 0;
    while (bucket < kBuckets - 1 && sums[bucket] < limit) {
        limit -= sums[bucket++];
    }
    const int64_t count = collect(x, n, b, [&](VecF v) { return weights.bucket(weights.distance(v)) == bucket; });
    weigh(b, count, weights);
    return select_column(b, count, limit);
}

template <typename T> void sample_rows(const Args &a) {
    const int64_t n = a.logits.size(-1), rows = a.logits.ndim == 1 ? 1 : a.logits.size(0);
    const int64_t row_stride = a.logits.ndim == 1 ? 0 : a.logits.stride(0);
    const auto *logits = a.logits.as<const T>();
    const int64_t bytes = a.logits.numel() * static_cast<int64_t>(sizeof(T));
    const auto sample = [&](int64_t begin, int64_t end) {
        const Buffers buffers(n);
        for (int64_t row = begin; row < end; ++row) {
            const auto seed = static_cast<uint64_t>(Indices(a.seed)[row]);
            const auto offset = static_cast<uint64_t>(Indices(a.offset)[row]);
            Settings s;
            s.temperature = a.temperature.as<const float>()[row * a.temperature.strides[0]];
            s.top_k = Indices(a.top_k)[row];
            s.top_p = a.top_p.as<const float>()[row * a.top_p.strides[0]];
            s.u = random_sample::uniform(seed, offset);
            a.out.as<int64_t>()[row * a.out.strides[0]] = sample_row(logits + row * row_stride, n, s, buffers);
        }
    };
    parallel_for(rows, bytes, sample, kParallelSampleBytes);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::random_sample::INFINI_LEVEL::cpu_kernel_given(const Given &given) {
    using namespace infini::INFINI_LEVEL;
    const GivenArgs &a = given.args;
    const auto u = static_cast<float>(a.random_val);
    const Settings settings{static_cast<float>(a.temperature), u == 0 ? 1 : a.topk, static_cast<float>(a.topp), u};
    const int64_t n = a.probs.size(0);
    const Buffers buffers(n);
    with_float_type(a.probs.dtype,
                    [&](auto x) { given.token = sample_row(a.probs.as<const decltype(x)>(), n, settings, buffers); });
}

void infini::random_sample::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.logits.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                          [&](auto x) { sample_rows<decltype(x)>(args); });
}
