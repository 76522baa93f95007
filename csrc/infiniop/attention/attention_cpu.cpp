// The CPU kernel of attention: online softmax over blocks of keys, with matrix products in register tiles.
// All query heads of a key head are rows of one matrix, so K and V are read from memory once for them; for each block
// of keys: scores = q K^T, probabilities by softmax, out += probabilities V. Few rows (decode) read K and V where they
// lie. Limits: decode reads K and V once (memory bandwidth); prefill does 4 flops for each visible (row, key, column).
#include "scratch.h"
#include "attention.h"
#include "parallel.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

using attention::Args;

// ---- the table of sizes ----

constexpr int64_t kRowBlock = 96;  // rows (queries x query heads of a key head) that share one packed block of keys
constexpr int64_t kKeyBlock = 128; // keys that are packed at a time: K, V and scores of a block stay in L2
// Up to so many rows their scores are dot products with K where it lies; above, packing K first costs less.
template <typename T> constexpr int64_t kDotRows = sizeof(T) == 4 ? 8 : 4;
constexpr int64_t kDirectRows = 12;   // up to so many rows V is multiplied where it lies; above, it is packed first
constexpr int64_t kPrefetchKeys = 64; // how far ahead K and V are fetched from memory where they are read once
// Where there is one block of rows (decode), long sequences are split for the threads, by their length alone: into
// pieces of at least so many keys, and into at most so many pieces.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kMaxSplits = 16;
constexpr int64_t kFlopsPerByte = 8; // of arithmetic that takes as long as one byte of traffic, for parallel_for

// Register tiles: rows x vectors of accumulators, as many as the machine's 32 or 16 registers hold.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

constexpr int64_t round_up(int64_t a, int64_t b) {
    return ceil_div(a, b) * b;
}

// ---- what q and K are packed to: floats, or pairs of bf16 where the machine multiplies those ----

struct Pair {
    uint32_t bits;
};

template <typename T> struct Packed {
    using Type = float;
};

#if defined(__AVX512BF16__)

template <> struct Packed<bf16> {
    using Type = Pair;
};

inline __m512bh load(const Pair *p) {
    __m512i v = _mm512_loadu_si512(p);
    return (__m512bh)v;
}

// One vector of packed columns from the n elements at p (2 * kLanes or more: all of them).
inline VecF load_packed(const Pair *, const bf16 *p, int64_t n) {
    return (VecF)_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p);
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const Pair *) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

inline VecF multiply_add(Pair left, __m512bh right, VecF sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(left.bits)), right);
}

#endif

inline VecF multiply_add(VecF left, VecF right, VecF sum, const float *) {
    return fma(left, right, sum);
}

inline VecF multiply_add(float left, VecF right, VecF sum) {
    return fma(splat(left), right, sum);
}

// How many elements of a row one packed column holds.
template <typename P> constexpr int64_t kElements = 1;
template <> constexpr int64_t kElements<Pair> = 2;

// ---- c [rows, vectors] = or += a [rows, depth] b [depth, vectors] ----

// The loops are unrolled by pragma because the compiler's own unrolling comes too late to keep the sums in registers.
template <int kRows, int kVectors, bool kAdd, typename A, typename B>
void tile(const A *a, int64_t a_stride, const B *b, int64_t b_stride, int64_t depth, float *c, int64_t c_stride) {
    VecF sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            sums[r][i] = kAdd ? load(c + r * c_stride + i * kLanes) : VecF{};
        }
    }
    for (int64_t at = 0; at < depth; ++at) {
        decltype(load(b)) right[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            right[i] = load(b + at * b_stride + i * kLanes);
            if (kAdd && i * kLanes * sizeof(B) % 64 == 0) { // V, where it is read in place
                __builtin_prefetch(b + (at + kPrefetchKeys) * b_stride + i * kLanes);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const A left = a[r * a_stride + at];
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
                sums[r][i] = multiply_add(left, right[i], sums[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            store(c + r * c_stride + i * kLanes, sums[r][i]);
        }
    }
}

template <bool kAdd, typename A, typename B> struct Tiles {
    using Function = void (*)(const A *, int64_t, const B *, int64_t, int64_t, float *, int64_t);

    template <int kVectors> static Function of_rows(int64_t rows) {
        switch (rows) {
        case 1:
            return tile<1, kVectors, kAdd, A, B>;
        case 2:
            return tile<2, kVectors, kAdd, A, B>;
        case 3:
            return tile<3, kVectors, kAdd, A, B>;
        case 4:
            return tile<4, kVectors, kAdd, A, B>;
        case 5:
            return tile<5, kVectors, kAdd, A, B>;
        default:
            return tile<kTileRows, kVectors, kAdd, A, B>;
        }
    }

    static Function of(int64_t rows, int64_t vectors) {
        switch (vectors) {
        case 1:
            return of_rows<1>(rows);
#if defined(__AVX512F__)
        case 2:
            return of_rows<2>(rows);
        case 3:
            return of_rows<3>(rows);
#endif
        default:
            return of_rows<kTileVectors>(rows);
        }
    }
};

// ---- packing ----

// The lanes of a and b in turn: a0 b0 a1 b1 ..., the first and the second half of them.
inline VecF zip_low(VecF a, VecF b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline VecF zip_high(VecF a, VecF b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// x as a matrix of kLanes rows, transposed: each round deals the rows like two halves of a pack of cards.
inline void transpose(VecF (&x)[kLanes]) {
#pragma GCC unroll 4
    for (int size = 1; size < kLanes; size *= 2) {
        VecF y[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) {
            y[2 * i] = zip_low(x[i], x[i + kLanes / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + kLanes / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            x[i] = y[i];
        }
    }
}

template <typename T> inline VecF load_packed(const float *, const T *p, int64_t n) {
    return n >= kLanes ? load(p) : load(p, static_cast<int>(n));
}

// Packed columns of a row of n elements, in whole vectors: what is behind them is packed as zeros.
template <typename P> constexpr int64_t packed_columns(int64_t n) {
    return round_up(ceil_div(n, kElements<P>), kLanes);
}

template <typename P, typename T> void pack_row(P *packed, const T *row, int64_t n) {
    constexpr int64_t step = kLanes * kElements<P>;
    for (; n > 0; n -= step, row += step, packed += kLanes) {
        const VecF v = load_packed(packed, row, n);
        std::memcpy(packed, &v, sizeof v);
    }
}

// Keys along the lanes: panels of [packed columns][kTileColumns keys]. Keys behind the last are zeros.
template <typename P, typename T> void pack_keys(P *packed, const T *k, int64_t stride, int64_t keys, int64_t n) {
    constexpr int64_t step = kLanes * kElements<P>;
    for (int64_t key = 0; key < keys; key += kLanes) {
        P *panel = packed + key / kTileColumns * kTileColumns * packed_columns<P>(n) + key % kTileColumns;
        for (int64_t c = 0; c < n; c += step) {
            const T *from = k + key * stride + c;
            VecF x[kLanes];
            if (keys - key >= kLanes && n - c >= step) {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    x[i] = load_packed(packed, from + i * stride, step);
                }
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    x[i] = key + i < keys ? load_packed(packed, from + i * stride, n - c) : VecF{};
                }
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                std::memcpy(panel, &x[i], sizeof x[i]);
                panel += kTileColumns;
            }
        }
    }
}

// Columns along the lanes, as floats: panels of [keys][kTileColumns columns]. Columns behind the last are zeros.
template <typename T> void pack_values(float *packed, const T *v, int64_t stride, int64_t keys, int64_t n) {
    for (int64_t column = 0; column < n; column += kTileColumns) {
        for (int64_t key = 0; key < keys; ++key) {
            for (int64_t c = column; c < column + kTileColumns; c += kLanes) {
                const int64_t rest = n - c;
                store(packed, rest >= kLanes ? load(v + key * stride + c)
                                             : load(v + key * stride + c, static_cast<int>(rest > 0 ? rest : 0)));
                packed += kLanes;
            }
        }
    }
}

// ---- scores of a few rows: dot products along the head size, with K where it lies ----

// Lane i of the result is the sum of the lanes of x[i].
inline VecF sum_each(VecF (&x)[kLanes]) {
#pragma GCC unroll 4
    for (int count = kLanes / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
            x[i] = zip_low(x[i], x[i + count]) + zip_high(x[i], x[i + count]);
        }
    }
    return x[0];
}

// kRows rows of q with all keys, kLanes products at a time.
template <int kRows, typename P, typename T>
void dot_rows(const P *q, int64_t q_stride, const T *k, int64_t stride, int64_t keys, int64_t n, float *scores) {
    constexpr int kKeys = kLanes / kRows;
    constexpr int64_t step = kLanes * kElements<P>;
    for (int64_t key = 0; key < keys; key += kKeys) {
        const T *rows[kKeys];
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i) {
            rows[i] = k + (key + i < keys ? key + i : keys - 1) * stride; // behind the last key: anything readable
        }
        VecF sums[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            sums[i] = VecF{};
        }
        const auto add = [&](int64_t c, int64_t rest) {
#pragma GCC unroll 16
            for (int i = 0; i < kKeys; ++i) {
                __builtin_prefetch(rows[i] + c + kPrefetchKeys * stride);
                const VecF right = load_packed(q, rows[i] + c, rest);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    VecF left;
                    std::memcpy(&left, q + r * q_stride + c / kElements<P>, sizeof left);
                    sums[r * kKeys + i] = multiply_add(left, right, sums[r * kKeys + i], q);
                }
            }
        };
        int64_t c = 0;
        for (; c + step <= n; c += step) {
            add(c, step);
        }
        if (c < n) {
            add(c, n - c);
        }
        const VecF totals = sum_each(sums);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(scores + r * kKeyBlock + key, reinterpret_cast<const char *>(&totals) + r * kKeys * 4,
                        kKeys * 4);
        }
    }
}

// ---- softmax ----

inline VecI lane_numbers() {
    VecI v;
    for (int i = 0; i < kLanes; ++i) {
        v[i] = i;
    }
    return v;
}

// The first n lanes of v (n may exceed their number), `other` in those behind.
inline VecF first_lanes(VecF v, int64_t n, float other) {
    return n >= kLanes ? v : select(lane_numbers() < VecI{} + static_cast<int>(n), v, splat(other));
}

// The largest score so far, and the sum of e^(score - largest) in as many parts as there are lanes.
struct RowState {
    VecF sum;
    float largest;
};

// One row's scores of a block become probabilities relative to the largest score so far: n keys are visible, the
// scores behind them up to `width`, which are read later, become 0. Returns the factor for earlier sums.
inline float softmax(float *scores, int64_t n, int64_t width, float scale, RowState &state) {
    const int64_t whole = n / kLanes * kLanes;
    // The last visible scores, and -infinity in the lanes behind them.
    const auto last = [&] { return first_lanes(load(scores + whole) * splat(scale), n - whole, -INFINITY); };
    VecF largest = splat(state.largest);
    for (int64_t i = 0; i < whole; i += kLanes) {
        largest = max(load(scores + i) * splat(scale), largest);
    }
    if (whole < n) {
        largest = max(last(), largest);
    }
    const float before = state.largest;
    state.largest = max(largest);
    const float base = state.largest == -INFINITY ? 0.0f : state.largest; // nothing is visible yet
    const float factor = state.largest == before ? 1.0f : exp(splat(before - base))[0];
    VecF sum = state.sum * splat(factor);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const VecF p = exp(load(scores + i) * splat(scale) - splat(base));
        sum = sum + p;
        store(scores + i, p);
    }
    int64_t done = whole;
    if (whole < n) {
        const VecF p = exp(last() - splat(base));
        sum = sum + p;
        store(scores + whole, p);
        done += kLanes;
    }
    for (; done < width; done += kLanes) {
        store(scores + done, VecF{});
    }
    state.sum = sum;
    return factor;
}

// The row of a mask from the key at p on: one of three element kinds, any stride.
template <typename M> inline VecF load_mask(const M *p, int64_t stride, int n) {
    if (stride == 0) {
        return splat(widen(*p));
    }
    if (stride == 1) {
        return n == kLanes ? load(p) : load(p, n);
    }
    VecF v = {};
    for (int i = 0; i < n; ++i) {
        v[i] = widen(p[i * stride]);
    }
    return v;
}

inline VecF load_mask(const bool *p, int64_t stride, int n) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes visible = {};
    if (stride == 1) {
        std::memcpy(&visible, p, static_cast<size_t>(n));
    } else {
        for (int i = 0; i < n; ++i) {
            visible[i] = p[i * stride];
        }
    }
    return select(__builtin_convertvector(visible == 0, VecI), splat(-INFINITY), VecF{});
}

template <typename M> void add_mask(float *scores, const M *mask, int64_t stride, int64_t n, float scale) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store(scores + i, fma(load(scores + i), splat(scale), load_mask(mask + i * stride, stride, lanes)));
    });
}

void add_mask(float *scores, const TensorView &mask, int64_t offset, int64_t stride, int64_t n, float scale) {
    if (mask.dtype == INFINI_DTYPE_BOOL) {
        add_mask(scores, mask.as<const bool>() + offset, stride, n, scale);
    } else {
        with_float_type(mask.dtype, [&](auto type) {
            add_mask(scores, mask.as<const decltype(type)>() + offset, stride, n, scale);
        });
    }
}

// ---- one call ----

template <typename T> class Attention {
    using P = typename Packed<T>::Type;

public:
    explicit Attention(const Args &args) : a_(args) {
        batch_ = a_.q.size(0), queries_ = a_.q.size(1), heads_ = a_.q.size(2), size_ = a_.q.size(3);
        keys_ = a_.k.size(1), kv_heads_ = a_.k.size(2);
        group_ = heads_ / kv_heads_;
        rows_ = queries_ * group_;
        row_blocks_ = ceil_div(rows_, kRowBlock);
        row_limit_ = row_blocks_ == 1 ? rows_ : kRowBlock;
        depth_ = ceil_div(size_, kElements<P>);
        columns_ = packed_columns<P>(size_);
        width_ = round_up(size_, kTileColumns);
        packs_values_ = row_limit_ > kDirectRows || size_ % kLanes != 0;
        scale_ = static_cast<float>(a_.scale);
        for (int64_t b = 0; b < batch_; ++b) {
            total_keys_ += length(b);
            splits_ = splits(b) > splits_ ? splits(b) : splits_;
        }
        for (int i = 0; i < 4; ++i) {
            mask_strides_[i] = a_.mask.shape[i] == 1 ? 0 : a_.mask.strides[i];
        }
    }

    void run() {
        const int64_t pieces = batch_ * kv_heads_ * splits_, units = pieces * row_blocks_;
        const int64_t workers = units < omp_get_max_threads() ? units : omp_get_max_threads();
        // Everything is taken here, before the threads start, for running short of memory must not end them.
        const int64_t partial_floats = splits_ > 1 ? pieces * rows_ * (width_ + 2) : 0;
        const int64_t partial_bytes = round_up(partial_floats * 4, 64);
        auto *memory =
            static_cast<char *>(cpu::scratch(static_cast<size_t>(partial_bytes + workers * Workspace::bytes(*this))));
        partial_out_ = reinterpret_cast<float *>(memory);
        partial_sums_ = partial_out_ + pieces * rows_ * width_;
        const int64_t pairs = total_keys_ * kv_heads_ * size_;
        const int64_t work = pairs * 2 * static_cast<int64_t>(sizeof(T)) + pairs * rows_ * 4 / kFlopsPerByte;
        int64_t next = 0;
        parallel_for(workers, work, [&](int64_t begin, int64_t) {
            const Workspace space(*this, memory + partial_bytes + begin * Workspace::bytes(*this));
            // Units differ in work (causal masks, lengths): each worker takes the next one when it is done.
            for (;;) {
                const int64_t unit = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
                if (unit >= units) {
                    break;
                }
                compute(unit / row_blocks_, row_blocks_ - 1 - unit % row_blocks_, space);
            }
        });
        if (splits_ > 1) {
            const int64_t lines = batch_ * kv_heads_ * rows_;
            parallel_for(lines, partial_floats * 4, [&](int64_t begin, int64_t end) {
                for (int64_t line = begin; line < end; ++line) {
                    combine(line / rows_, line % rows_);
                }
            });
        }
    }

private:
    // What one worker needs while it goes through a unit.
    struct Workspace {
        P *q;            // [rows, columns]
        P *k;            // panels of [columns][kTileColumns]
        float *v;        // panels of [kKeyBlock][kTileColumns]
        float *scores;   // [rows, kKeyBlock]
        float *out;      // [rows, width]
        RowState *state; // [rows]

        static int64_t q_bytes(const Attention &a) { return round_up(a.row_limit_ * a.columns_ * 4, 64); }
        static int64_t k_bytes(const Attention &a) { return kKeyBlock * a.columns_ * 4; }
        static int64_t v_bytes(const Attention &a) { return a.packs_values_ ? kKeyBlock * a.width_ * 4 : 0; }
        static int64_t scores_bytes(const Attention &a) { return a.row_limit_ * kKeyBlock * 4; }
        static int64_t out_bytes(const Attention &a) { return round_up(a.row_limit_ * a.width_ * 4, 64); }
        static int64_t state_bytes(const Attention &a) {
            return round_up(a.row_limit_ * static_cast<int64_t>(sizeof(RowState)), 64);
        }
        static int64_t bytes(const Attention &a) {
            return q_bytes(a) + k_bytes(a) + v_bytes(a) + scores_bytes(a) + out_bytes(a) + state_bytes(a);
        }

        Workspace(const Attention &a, char *memory) {
            q = reinterpret_cast<P *>(memory);
            k = reinterpret_cast<P *>(memory += q_bytes(a));
            v = reinterpret_cast<float *>(memory += k_bytes(a));
            scores = reinterpret_cast<float *>(memory += v_bytes(a));
            out = reinterpret_cast<float *>(memory += scores_bytes(a));
            state = reinterpret_cast<RowState *>(memory += out_bytes(a));
        }
    };

    int64_t length(int64_t b) const {
        if (!a_.kv_lens.dtype) {
            return keys_;
        }
        const int64_t at = b * a_.kv_lens.stride(0);
        return a_.kv_lens.dtype == INFINI_DTYPE_I32 ? a_.kv_lens.as<const int32_t>()[at]
                                                    : a_.kv_lens.as<const int64_t>()[at];
    }

    int64_t splits(int64_t b) const {
        const int64_t count = row_blocks_ == 1 ? ceil_div(length(b), kSplitKeys) : 1;
        return count < 1 ? 1 : count > kMaxSplits ? kMaxSplits : count;
    }

    // How many keys a row of sequence b sees.
    int64_t visible(int64_t b, int64_t row) const {
        const int64_t all = length(b);
        const int64_t seen = a_.causal ? all - queries_ + row / group_ + 1 : all;
        return seen < 0 ? 0 : seen;
    }

    // Where a row of (sequence, key head) lies in q or out.
    int64_t offset(const TensorView &view, int64_t b, int64_t kv_head, int64_t row) const {
        return b * view.strides[0] + row / group_ * view.strides[1] +
               (kv_head * group_ + row % group_) * view.strides[2];
    }

    // One block of rows against one piece of the keys; piece = (sequence, key head, split).
    void compute(int64_t piece, int64_t block, const Workspace &space) const {
        const int64_t split = piece % splits_, kv_head = piece / splits_ % kv_heads_, b = piece / splits_ / kv_heads_;
        const int64_t count = splits(b);
        if (split >= count) {
            return;
        }
        const int64_t first_row = block * kRowBlock;
        const int64_t rows = rows_ - first_row < kRowBlock ? rows_ - first_row : kRowBlock;
        const int64_t size = round_up(ceil_div(length(b), count), kKeyBlock);
        const int64_t begin = split * size;
        const int64_t seen = visible(b, first_row + rows - 1);
        const int64_t end = count > 1 && begin + size < seen ? begin + size : seen;

        const auto *q = a_.q.template as<const T>();
        for (int64_t r = 0; r < rows; ++r) {
            pack_row(space.q + r * columns_, q + offset(a_.q, b, kv_head, first_row + r), size_);
            space.state[r] = {VecF{}, -INFINITY};
        }
        std::memset(space.out, 0, static_cast<size_t>(rows * width_) * 4);
        for (int64_t key = begin; key < end; key += kKeyBlock) {
            const int64_t keys = end - key < kKeyBlock ? end - key : kKeyBlock;
            attend(b, kv_head, first_row, rows, key, keys, space);
        }

        for (int64_t r = 0; r < rows; ++r) {
            const float total = sum(space.state[r].sum);
            const float *line = space.out + r * width_;
            if (count > 1) {
                const int64_t at = piece * rows_ + r;
                std::memcpy(partial_out_ + at * width_, line, static_cast<size_t>(width_) * 4);
                partial_sums_[2 * at] = total;
                partial_sums_[2 * at + 1] = space.state[r].largest;
            } else {
                write(b, kv_head, first_row + r, line, total);
            }
        }
    }

    // A block of keys: scores, probabilities, and their product with V added to out.
    void attend(int64_t b, int64_t kv_head, int64_t first_row, int64_t rows, int64_t key, int64_t keys,
                const Workspace &space) const {
        const auto *k =
            a_.k.template as<const T>() + b * a_.k.strides[0] + key * a_.k.strides[1] + kv_head * a_.k.strides[2];
        const auto *v =
            a_.v.template as<const T>() + b * a_.v.strides[0] + key * a_.v.strides[1] + kv_head * a_.v.strides[2];
        // Of these keys, what the last of the rows up to `row` sees.
        const auto seen = [&](int64_t row) {
            const int64_t n = visible(b, first_row + row) - key;
            return n < 0 ? 0 : n < keys ? n : keys;
        };
        if (row_limit_ <= kDotRows<T>) {
            dot_all(space.q, k, keys, space.scores);
        } else {
            pack_keys(space.k, k, a_.k.strides[1], keys, size_);
            for (int64_t at = 0; at < keys; at += kTileColumns) {
                for_each_tile(rows, [&](int64_t row, int64_t count) {
                    const int64_t n = seen(row + count - 1) - at;
                    if (n > 0) {
                        Tiles<false, P, P>::of(count, n < kTileColumns ? ceil_div(n, kLanes) : kTileVectors)(
                            space.q + row * columns_, columns_, space.k + at * columns_, kTileColumns, depth_,
                            space.scores + row * kKeyBlock + at, kKeyBlock);
                    }
                });
            }
        }
        for_each_tile(rows, [&](int64_t row, int64_t count) {
            const int64_t width = seen(row + count - 1);
            for (int64_t r = row; r < row + count; ++r) {
                float *scores = space.scores + r * kKeyBlock;
                const int64_t n = seen(r);
                float scale = scale_;
                if (a_.mask.dtype) {
                    const int64_t t = (first_row + r) / group_, head = kv_head * group_ + (first_row + r) % group_;
                    const int64_t *strides = mask_strides_;
                    add_mask(scores, a_.mask, b * strides[0] + head * strides[1] + t * strides[2] + key * strides[3],
                             strides[3], n, scale);
                    scale = 1.0f;
                }
                if (!packs_values_ && row_limit_ > kDotRows<T>) {
                    // Memory is idle here: the rows share out the keys of the next block.
                    prefetch(k + keys * a_.k.strides[1], keys * r / rows, keys * (r + 1) / rows);
                }
                const float factor = softmax(scores, n, width, scale, space.state[r]);
                if (factor != 1.0f) {
                    float *out = space.out + r * width_;
                    for (int64_t i = 0; i < width_; i += kLanes) {
                        store(out + i, load(out + i) * splat(factor));
                    }
                }
            }
        });
        if (packs_values_) {
            pack_values(space.v, v, a_.v.strides[1], keys, size_);
            add_values(rows, seen, space, space.v, kTileColumns, keys * kTileColumns);
        } else {
            add_values(rows, seen, space, v, a_.v.strides[1], kTileColumns);
        }
    }

    void dot_all(const P *q, const T *k, int64_t keys, float *scores) const {
        for (int64_t row = 0; row < rows_;) {
            const int64_t count = rows_ - row >= 4 ? 4 : rows_ - row >= 2 ? 2 : 1;
            (count == 4   ? dot_rows<4, P, T>
             : count == 2 ? dot_rows<2, P, T>
                          : dot_rows<1, P, T>)(q + row * columns_, columns_, k, a_.k.strides[1], keys, size_,
                                               scores + row * kKeyBlock);
            row += count;
        }
    }

    void prefetch(const T *k, int64_t begin, int64_t end) const {
        for (int64_t key = begin; key < end; ++key) {
            for (int64_t c = 0; c < size_; c += 64 / static_cast<int64_t>(sizeof(T))) {
                __builtin_prefetch(k + key * a_.k.strides[1] + c);
            }
        }
    }

    // out += probabilities V; V is made of panels of kTileColumns columns.
    template <typename Seen, typename V>
    void add_values(int64_t rows, const Seen &seen, const Workspace &space, const V *v, int64_t stride,
                    int64_t panel) const {
        for (int64_t column = 0; column < size_; column += kTileColumns, v += panel) {
            const int64_t rest = ceil_div(size_ - column, kLanes);
            for_each_tile(rows, [&](int64_t row, int64_t count) {
                Tiles<true, float, V>::of(count, rest < kTileVectors ? rest : kTileVectors)(
                    space.scores + row * kKeyBlock, kKeyBlock, v, stride, seen(row + count - 1),
                    space.out + row * width_ + column, width_);
            });
        }
    }

    // Calls body(row, count) for tiles of at most kTileRows rows, as even as can be.
    template <typename Body> static void for_each_tile(int64_t rows, const Body &body) {
        const int64_t tiles = ceil_div(rows, kTileRows);
        for (int64_t i = 0; i < tiles; ++i) {
            body(rows * i / tiles, rows * (i + 1) / tiles - rows * i / tiles);
        }
    }

    // The row's sums over the splits, each relative to its own largest score, become its result.
    void combine(int64_t line, int64_t row) const {
        const int64_t kv_head = line % kv_heads_, b = line / kv_heads_, count = splits(b);
        if (count == 1) {
            return;
        }
        const auto at = [&](int64_t split) { return (line * splits_ + split) * rows_ + row; };
        float largest = -INFINITY;
        for (int64_t i = 0; i < count; ++i) {
            const float value = partial_sums_[2 * at(i) + 1];
            largest = value > largest ? value : largest;
        }
        largest = largest == -INFINITY ? 0.0f : largest;
        float total = 0;
        float *out = partial_out_ + at(0) * width_;
        for (int64_t i = 0; i < count; ++i) {
            const VecF factor = exp(splat(partial_sums_[2 * at(i) + 1] - largest));
            const float *part = partial_out_ + at(i) * width_;
            total += partial_sums_[2 * at(i)] * factor[0];
            for (int64_t c = 0; c < width_; c += kLanes) {
                store(out + c, i == 0 ? load(part + c) * factor : fma(load(part + c), factor, load(out + c)));
            }
        }
        write(b, kv_head, row, out, total);
    }

    void write(int64_t b, int64_t kv_head, int64_t row, const float *line, float total) const {
        T *out = a_.out.template as<T>() + offset(a_.out, b, kv_head, row);
        const VecF inverse = splat(1.0f / total);
        for_each_vector(size_, [&](int64_t i, auto lanes) {
            store_at(out, i, total == 0 ? VecF{} : load(line + i) * inverse, lanes);
        });
    }

    const Args &a_;
    int64_t batch_, queries_, heads_, size_, keys_, kv_heads_;
    int64_t group_;      // query heads of a key head
    int64_t rows_;       // of a key head: row = query * group + head in the group
    int64_t row_blocks_; // of kRowBlock rows
    int64_t row_limit_;  // rows in the largest block
    int64_t depth_;      // packed columns of a row of q or k that are not padding
    int64_t columns_;    // and with padding
    int64_t width_;      // columns of a row of out, whole tiles
    int64_t total_keys_ = 0;
    int64_t splits_ = 1; // of the longest sequence
    int64_t mask_strides_[4];
    bool packs_values_;
    float scale_;
    float *partial_out_ = nullptr;  // [pieces, rows, width]
    float *partial_sums_ = nullptr; // [pieces, rows, 2]: the sum and the largest score
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::attention::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.q.dtype, [&](auto q) { Attention<decltype(q)>(args).run(); });
}
