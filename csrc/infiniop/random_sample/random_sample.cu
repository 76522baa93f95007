// The CUDA kernel of random_sample: one thread block per row, which it neither sorts nor stores. Weights are integers,
// scaled so that n of them sum to at most 2^62: integer sums are the same in any order, so atomic additions to a
// histogram in shared memory may compute them. The passes over a row:
//   1. The maximum, its first column, and whether there is a NaN or +infinity. Greedy rows end here.
//   2. A histogram of the weights over 2048 equal steps of (maximum - x) / temperature; for top-k also of their number.
//   3. A histogram over the values in the step that contains the limit, repeated until one value is left: once for
//      bfloat16 and float16, usually twice for float32. With top-k, as many passes before that find the k-th value.
//   4. A histogram over the columns with that value, to find the chosen column; then 64 columns once more.
// Limit of greedy rows: memory bandwidth; 128 rows of 128,256 bfloat16 are 33 MB, 8 us at 4.3 TB/s. With top-p each of
// these rows is read 4 times (float32: 5), after the first time from L2, which holds them all. An estimate for a
// multiprocessor with one of the rows: 8 us for pass 1; 20,000 cycles for reading 3 x 257 KB from the cache; 60,000 for
// about 60 instructions per logit; 50,000 to 100,000 for 2 atomic additions per logit, with a few conflicts in a warp:
// 80 to 110 us at 1.75 GHz. Not measured.
// SASS: sample_rows: LDG.E.128 ATOMS.ADD MUFU.EX2
#include <limits>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "indices.h"
#include "philox.h"
#include "random_sample.h"

namespace infini::random_sample {
namespace {

using cuda::Compute;
using cuda::kWarp;

template <typename C> constexpr C kSmallest = std::numeric_limits<C>::min();
template <typename C> constexpr C kLargest = std::numeric_limits<C>::max();

struct Floats {
    const float *data = nullptr;
    int64_t stride = 0;

    Floats() = default;
    explicit Floats(const TensorView &view) : data(view.as<const float>()), stride(view.strides[0]) {}
    __device__ __forceinline__ float operator[](int64_t i) const { return data[i * stride]; }
};

// One number per row (of Floats or Indices), or one for the call.
template <typename V, typename List> struct PerRow {
    List list;
    V given = 0;

    explicit PerRow(V given) : given(given) {}
    explicit PerRow(const TensorView &view) : list(view) {}
    __device__ __forceinline__ V operator[](int64_t row) const { return list.data == nullptr ? given : list[row]; }
};
using FloatPerRow = PerRow<float, Floats>;
using IndexPerRow = PerRow<int64_t, Indices>;

template <typename T> struct Job {
    const T *logits;
    int64_t n, row_stride;
    bool whole;      // vector accesses to the logits are possible
    Compute<T> unit; // the weight 1 as an integer, a power of two
    void *out;
    int64_t out_stride;
    int out_bytes; // size of a token in bytes
    FloatPerRow temperature;
    IndexPerRow top_k;
    FloatPerRow top_p;
    bool given; // true: u is given; false: from these
    IndexPerRow seed, offset;
    float u;
};

constexpr int kDigitBits = 11;
constexpr unsigned kBuckets = 1 << kDigitBits, kNowhere = kBuckets;

// The buckets of the first histogram; the last one takes all distances from 32 on, whose weights are below 1.3e-14.
constexpr int kBucketsPerUnit = 64;

// The sum of the weights of some columns, and the number of columns with a weight.
struct Amount {
    unsigned long long mass;
    unsigned count;
};

__device__ __forceinline__ Amount operator+(const Amount &a, const Amount &b) {
    return {a.mass + b.mass, a.count + b.count};
}

// Which sums a histogram computes; the others stay 0.
struct Kinds {
    bool mass, count;
};

// Weights are added in two halves: shared memory has no 64-bit atomic additions.
struct Histogram {
    unsigned low[kBuckets], high[kBuckets], count[kBuckets];

    __device__ __forceinline__ Amount operator[](unsigned i) const {
        return {static_cast<unsigned long long>(high[i]) << 32 | low[i], count[i]};
    }
    __device__ __forceinline__ void clear(unsigned i) { low[i] = high[i] = count[i] = 0; }
    __device__ __forceinline__ void add(unsigned i, const Amount &amount, Kinds kinds) {
        if (kinds.mass) {
            const auto part = static_cast<unsigned>(amount.mass);
            const unsigned carry = atomicAdd(&low[i], part) + part < part ? 1 : 0;
            const unsigned upper = static_cast<unsigned>(amount.mass >> 32) + carry;
            if (upper > 0) {
                atomicAdd(&high[i], upper);
            }
        }
        if (kinds.count) {
            atomicAdd(&count[i], amount.count);
        }
    }
};

// Maps the values of a dtype to unsigned integers in the same order, and back.
template <int kBytes> struct Word;
template <> struct Word<2> {
    using type = uint16_t;
};
template <> struct Word<4> {
    using type = uint32_t;
};
template <> struct Word<8> {
    using type = uint64_t;
};
template <typename T> using Bits = typename Word<sizeof(T)>::type;
template <typename T> using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <typename T> constexpr Bits<T> kSign = static_cast<Bits<T>>(Bits<T>{1} << (8 * sizeof(T) - 1));

template <typename T> __device__ __forceinline__ Key<T> key_of(Compute<T> value) {
    const T stored = cuda::narrow<T>(value + 0); // -0 becomes 0
    Bits<T> bits;
    memcpy(&bits, &stored, sizeof bits);
    return (bits & kSign<T>) != 0 ? static_cast<Bits<T>>(~bits) : static_cast<Bits<T>>(bits | kSign<T>);
}

template <typename T> __device__ __forceinline__ Compute<T> value_of(Key<T> key) {
    const auto order = static_cast<Bits<T>>(key);
    const auto bits = static_cast<Bits<T>>((order & kSign<T>) != 0 ? order ^ kSign<T> : ~order);
    T stored;
    memcpy(&stored, &bits, sizeof bits);
    return cuda::widen(stored);
}

__device__ __forceinline__ unsigned long long whole_number(float v) {
    return __float2ull_rn(v);
}
__device__ __forceinline__ unsigned long long whole_number(double v) {
    return __double2ull_rn(v);
}

// A row, its maximum and its weights.
template <typename T> struct Row {
    using C = Compute<T>;

    const T *x;
    uint32_t n;
    bool whole;
    C unit, top, inverse;

    __device__ __forceinline__ C distance(C v) const { return (top - v) * inverse; }
    __device__ __forceinline__ unsigned long long weight(C v) const { return whole_number(exp(-distance(v)) * unit); }
    __device__ __forceinline__ unsigned bucket(C v) const {
        return static_cast<unsigned>(fmin(distance(v) * kBucketsPerUnit, static_cast<C>(kBuckets - 1)));
    }

    // Calls body(column, value) for columns begin .. end-1, begin a multiple of kWidth.
    template <typename Body>
    __device__ __forceinline__ void visit(uint32_t begin, uint32_t end, const Body &body) const {
        constexpr int kWidth = cuda::kWidth<T>;
        cuda::RowPart<T, 0, T, 2>(x + begin, end - begin, whole).visit([&](int64_t i, int count, C(&v)[kWidth]) {
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
                if (e < count) {
                    body(begin + static_cast<uint32_t>(i) + e, v[e]);
                }
            }
        });
    }
};

// The columns that a histogram covers, and their buckets. Either all columns, by distance from the maximum; or the
// columns in one of those buckets with keys in low .. high, largest first; or the columns low .. high that have one
// value.
template <typename T> struct Place {
    using C = Compute<T>;

    enum { kDistance, kKey, kColumn } by;
    unsigned first; // the bucket of the first histogram
    C value;
    Key<T> low, high; // keys or columns
    int shift;        // the right shift that turns a distance into a bucket of this histogram

    __device__ __forceinline__ unsigned operator()(const Row<T> &row, uint32_t column, C v) const {
        if (by == kColumn) {
            return v == value && column >= low ? static_cast<unsigned>((column - low) >> shift) : kNowhere;
        }
        const unsigned bucket = row.bucket(v);
        if (by == kDistance || bucket != first) {
            return by == kDistance ? bucket : kNowhere;
        }
        const Key<T> key = key_of<T>(v);
        return key >= low && key <= high ? static_cast<unsigned>((high - key) >> shift) : kNowhere;
    }

    __device__ void start_keys(const Row<T> &row, unsigned bucket) {
        // Widens the bucket's range of values at both ends, because of rounding.
        constexpr C kMore = 1e-6f;
        const C near = static_cast<C>(bucket) / kBucketsPerUnit * (1 - kMore) / row.inverse;
        const C far = static_cast<C>(bucket + 1) / kBucketsPerUnit * (1 + kMore) / row.inverse;
        const C highest = row.top - near, lowest = bucket == kBuckets - 1 ? -cuda::kInfinity<C> : row.top - far;
        by = kKey;
        first = bucket;
        high = key_of<T>(fmin(highest + fabs(highest) * kMore, row.top)); // NaN becomes the maximum
        low = key_of<T>(lowest - fabs(lowest) * kMore);
    }
    __device__ void start_columns(const Row<T> &row, C of_value) {
        by = kColumn;
        value = of_value;
        low = 0;
        high = row.n - 1;
    }
    // Narrows low .. high to one bucket.
    __device__ void narrow_to(unsigned bucket) {
        const Key<T> range = high - low, wanted = static_cast<Key<T>>(bucket) << shift;
        const Key<T> before = wanted < range ? wanted : range;
        const Key<T> last = (Key<T>{1} << shift) - 1, after = range - before > last ? range - before - last : 0;
        high -= by == kColumn ? after : before;
        low += by == kColumn ? before : after;
    }
    __device__ void set_shift() {
        for (shift = 0; (high - low) >> shift >= kBuckets;) {
            ++shift;
        }
    }
};

// The searches in a row, in this order, and the state of the current one. In shared memory; only thread 0 writes.
template <typename T> struct Search {
    enum {
        kTotal,  // the amount of all columns
        kLast,   // the k-th value
        kToken,  // the value at which the weights reach the limit
        kColumn, // the column with that value
        kAnswered
    } question;
    Row<T> row;
    Place<T> place;
    bool filled;               // the histogram is complete
    unsigned long long target; // the search ends where the amounts, summed from the maximum downwards, reach it
    Amount above;              // the amounts above `place`
    Amount all;
    int64_t top_k;
    double p, u;

    __device__ void begin(const Row<T> &this_row, int64_t row_top_k, float row_p, float row_u) {
        row = this_row;
        question = kTotal;
        place.by = Place<T>::kDistance;
        filled = false;
        target = 0;
        above = {};
        top_k = row_top_k;
        p = row_p < 1 ? row_p : 1;
        u = row_u;
    }

    // Which sums the current search needs.
    __device__ __forceinline__ Kinds kinds() const {
        return {question != kColumn, question == kTotal ? top_k > 0 : question != kToken};
    }

    // The histogram sums to `total` and reaches the target in `bucket`; `before` is the amount before that bucket. Not
    // inlined, because its registers would add to those of the passes.
    __device__ __noinline__ void go_on(unsigned bucket, Amount before, Amount total) {
        if (question == kTotal) {
            all = total;
            top_k > 0 && top_k < all.count ? ask(kLast, top_k) : ask_for_token(all.mass);
            return;
        }
        above = before;
        if (place.by == Place<T>::kDistance) {
            place.start_keys(row, bucket);
        } else {
            place.narrow_to(bucket);
        }
        if (place.low == place.high) {
            if (question == kLast) {
                const unsigned long long each = row.weight(value_of<T>(place.low));
                return ask_for_token(above.mass + (static_cast<unsigned>(top_k) - above.count) * each);
            }
            if (question == kColumn) {
                question = kAnswered;
                return;
            }
            const Compute<T> value = value_of<T>(place.low);
            const unsigned long long each = row.weight(value);
            question = kColumn;
            target = (target - above.mass + each - 1) / each;
            above = {};
            place.start_columns(row, value);
        }
        place.set_shift();
        filled = false;
    }

private:
    __device__ void ask(decltype(kTotal) next, unsigned long long to_reach) {
        question = next;
        target = to_reach;
        above = {};
        place.by = Place<T>::kDistance;
        filled = true;
    }
    // kept: the total weight that top-k keeps.
    __device__ void ask_for_token(unsigned long long kept) {
        // A sum of integers reaches the limit if it reaches the limit rounded up. The first weight is above 0.
        const double limit = ceil(u * fmin(static_cast<double>(kept), p * static_cast<double>(all.mass)));
        const auto whole = limit < 1 ? 1ULL : static_cast<unsigned long long>(limit);
        ask(kToken, whole < kept ? whole : kept);
    }
};

template <typename T> struct Shared {
    Histogram by_distance, within; // within one bucket of the first
    Search<T> search;
    Amount warps[kWarp];
    Compute<T> values[kWarp];
    uint32_t columns[kWarp];
};

// All threads of a block must call the functions below, with the same arguments.

// Fills the histogram with the columns that have a weight.
template <typename T>
__device__ __forceinline__ void fill(Histogram &h, const Row<T> &row, const Place<T> place, Kinds kinds) {
    for (unsigned i = threadIdx.x; i < kBuckets; i += blockDim.x) {
        h.clear(i);
    }
    __syncthreads();
    // The latest columns' bucket; their amount is added when the bucket changes, because equal ones often follow.
    unsigned bucket = kNowhere;
    Amount amount{};
    constexpr uint32_t kWidth = cuda::kWidth<T>;
    const bool some = place.by == Place<T>::kColumn; // columns with the chosen value all have a weight
    row.visit(some ? static_cast<uint32_t>(place.low) / kWidth * kWidth : 0,
              some ? static_cast<uint32_t>(place.high) + 1 : row.n, [&](uint32_t column, Compute<T> v) {
                  const unsigned next = place(row, column, v);
                  const unsigned long long mass = next == kNowhere ? 0 : some ? 1 : row.weight(v);
                  if (mass > 0) {
                      if (next != bucket) {
                          if (bucket != kNowhere) {
                              h.add(bucket, amount, kinds);
                          }
                          bucket = next;
                          amount = {};
                      }
                      amount = amount + Amount{mass, 1};
                  }
              });
    if (bucket != kNowhere) {
        h.add(bucket, amount, kinds);
    }
    __syncthreads();
}

// Adds to `before` the amounts of the preceding threads; returns the amount of all threads.
__device__ __forceinline__ Amount scan(const Amount &part, Amount (&warps)[kWarp], Amount &before) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const unsigned warp = threadIdx.x / kWarp;
    Amount sum = part;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const Amount other{__shfl_up_sync(cuda::kAllLanes, sum.mass, distance),
                           __shfl_up_sync(cuda::kAllLanes, sum.count, distance)};
        sum = lane >= distance ? sum + other : sum;
    }
    if (lane == kWarp - 1) {
        warps[warp] = sum;
    }
    __syncthreads();
    Amount all{};
    before = before + Amount{sum.mass - part.mass, sum.count - part.count};
    for (unsigned i = 0; i < blockDim.x / kWarp; ++i) {
        before = i < warp ? before + warps[i] : before;
        all = all + warps[i];
    }
    return all;
}

// One step of the search: finds where the histogram reaches the target.
template <typename T>
__device__ __forceinline__ void find(Search<T> &search, const Histogram &h, Amount (&warps)[kWarp]) {
    const bool by_mass = search.question == Search<T>::kToken;
    const auto measure = [&](const Amount &amount) { return by_mass ? amount.mass : amount.count; };
    const unsigned each = kBuckets / blockDim.x, begin = threadIdx.x * each; // the number of threads is a power of two
    Amount part{};
    for (unsigned i = begin; i < begin + each; ++i) {
        part = part + h[i];
    }
    Amount before = search.above;
    const Amount all = scan(part, warps, before);
    // One thread owns the place; if rounding leaves none, the last thread takes it.
    const unsigned long long target = search.target;
    const bool last = threadIdx.x == blockDim.x - 1;
    const bool mine = (threadIdx.x == 0 || measure(before) < target) && (last || target <= measure(before + part));
    __syncthreads(); // until all threads have read what go_on writes
    if (mine) {
        unsigned i = begin;
        for (; i + 1 < begin + each && measure(before + h[i]) < target; ++i) {
            before = before + h[i];
        }
        search.go_on(i, before, all);
    }
    __syncthreads();
}

// Returns the token, or an error code below 0: see random_sample.h.
template <typename T>
__device__ __forceinline__ int64_t sample(Shared<T> &shared, Row<T> row, float temperature, int64_t top_k, float top_p,
                                          float u) {
    using C = Compute<T>;
    const int64_t n = row.n;
    if (!(temperature >= 0 && temperature < cuda::kInfinity<float> && top_p >= 0)) {
        return -2 - n;
    }
    C best = -cuda::kInfinity<C>; // the thread's maximum
    uint32_t column = row.n, refused = row.n;
    row.visit(0, row.n, [&](uint32_t i, C v) {
        if (!(v < cuda::kInfinity<C>)) {
            refused = min(refused, i);
        } else if (v > best) {
            best = v;
            column = i;
        }
    });
    refused = cuda::row_reduce<cuda::Min>(refused, shared.columns);
    if (refused < row.n) {
        return -1 - static_cast<int64_t>(refused);
    }
    row.top = cuda::row_reduce<cuda::Max>(best, shared.values);
    if (row.top == -cuda::kInfinity<C>) {
        return -1 - n;
    }
    if (temperature == 0 || top_k == 1 || top_p == 0) {
        return cuda::row_reduce<cuda::Min>(best == row.top ? column : row.n, shared.columns);
    }
    // Bounded so that its product with 0 or infinity is not NaN.
    row.inverse = fmin(fmax(1 / static_cast<C>(temperature), kSmallest<C>), kLargest<C>);
    Search<T> &search = shared.search;
    if (threadIdx.x == 0) {
        search.begin(row, top_k, top_p, u);
    }
    __syncthreads();
    while (search.question != Search<T>::kAnswered) {
        Histogram &h = search.place.by == Place<T>::kDistance ? shared.by_distance : shared.within;
        if (!search.filled) {
            row.top = search.row.top; // read again, so that no register holds it meanwhile
            row.inverse = search.row.inverse;
            fill(h, row, search.place, search.kinds());
        }
        find(search, h, shared.warps);
    }
    return static_cast<int64_t>(search.place.low);
}

template <typename T> __global__ void __launch_bounds__(1024) sample_rows(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    const int64_t number = blockIdx.x;
    const Row<T> row{a.logits + number * a.row_stride, static_cast<uint32_t>(a.n), a.whole, a.unit, 0, 0};
    const float u =
        a.given ? a.u : uniform(static_cast<uint64_t>(a.seed[number]), static_cast<uint64_t>(a.offset[number]));
    const int64_t token =
        sample(*cuda::dynamic_shared<Shared<T>>(), row, a.temperature[number], a.top_k[number], a.top_p[number], u);
    if (threadIdx.x > 0) {
        return;
    }
    // If a number fits, its lower bytes are the same for signed and unsigned.
    const int64_t at = number * a.out_stride, narrow = token < 0 ? -1 : token;
    switch (a.out_bytes) {
    case 1:
        static_cast<uint8_t *>(a.out)[at] = static_cast<uint8_t>(narrow);
        break;
    case 2:
        static_cast<uint16_t *>(a.out)[at] = static_cast<uint16_t>(narrow);
        break;
    case 4:
        static_cast<uint32_t *>(a.out)[at] = static_cast<uint32_t>(token);
        break;
    default:
        static_cast<int64_t *>(a.out)[at] = token;
    }
}

// 2^62 divided by the least power of two that is at least n.
template <typename T> Compute<T> unit_for(int64_t n) {
    int bits = 0;
    while (int64_t{1} << bits < n) {
        ++bits;
    }
    return static_cast<Compute<T>>(uint64_t{1} << (62 - bits));
}

template <typename T> void launch(const ExecutionContext &context, const Job<T> &job, int64_t rows) {
    unsigned threads = 128; // a power of two; grows to 1024, with 32 columns per thread
    while (threads < 1024 && threads * 32 < job.n) {
        threads *= 2;
    }
    cuda::launch(context, sample_rows<T>, cuda::grid_x(rows), dim3(threads), sizeof(Shared<T>), job);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    const TensorView &logits = args.logits, &out = args.out;
    const bool one_row = logits.ndim == 1;
    const int64_t rows = one_row ? 1 : logits.size(0), n = logits.size(-1);
    if (rows == 0) {
        return;
    }
    infini::cuda::with_float_type(logits.dtype, [&](auto x) {
        using T = decltype(x);
        if constexpr (!std::is_same_v<T, double>) {
            launch<T>(context,
                      {logits.as<const T>(), n, one_row ? 0 : logits.stride(0), cuda::vectors_fit(logits),
                       unit_for<T>(n), out.data, one_row ? 0 : out.stride(0), 8, FloatPerRow(args.temperature),
                       IndexPerRow(args.top_k), FloatPerRow(args.top_p), false, IndexPerRow(args.seed),
                       IndexPerRow(args.offset), 0},
                      rows);
        }
    });
}

void run_given_on_cuda(const ExecutionContext &context, const GivenArgs &args) {
    const int64_t n = args.probs.size(0);
    const auto u = static_cast<float>(args.random_val);
    infini::cuda::with_float_type(args.probs.dtype, [&](auto x) {
        using T = decltype(x);
        launch<T>(context,
                  {args.probs.as<const T>(), n, 0, cuda::vectors_fit(args.probs), unit_for<T>(n), args.result.data, 0,
                   static_cast<int>(size_of(args.result.dtype)), FloatPerRow(static_cast<float>(args.temperature)),
                   IndexPerRow(u == 0 ? 1 : args.topk), FloatPerRow(static_cast<float>(args.topp)), true,
                   IndexPerRow(0), IndexPerRow(0), u},
                  1);
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};
const RegisteredKernel<GivenArgs> given_registered{given_kernels, INFINI_DEVICE_NVIDIA, run_given_on_cuda};

} // namespace
} // namespace infini::random_sample
