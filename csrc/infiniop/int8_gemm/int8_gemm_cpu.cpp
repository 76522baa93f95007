// The CPU kernel of int8_gemm: tiles of kRows x kColumns dot products along k, a few columns at a time against all
// rows, so that the columns stay in the first-level cache. Limit: for few rows the memory bandwidth of the weights, for
// many the multiply-adds of bytes (VNNI: 64 a cycle and unit); and for weights that are not column-major their
// transposition, panel by panel.
#include "int8_gemm.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int kRows = 4, kColumns = 4; // of a tile: 16 sums and 8 operands fit the 32 vector registers of AVX-512

// From this much work on the columns are split among threads: an int8 product does 2 * k operations for each byte of
// out.
constexpr int64_t kProductParallelBytes = kParallelBytes;

// Dot products of bytes: Bytes holds kBytes of them; dot adds x * w in groups to the lanes of sum.
#if defined(__AVX512VNNI__)

constexpr int kBytes = 64;
typedef __m512i Bytes;

inline Bytes load_bytes(const int8_t *p) {
    return _mm512_loadu_si512(p);
}

inline Bytes load_bytes(const int8_t *p, int64_t n) {
    return _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p);
}

// vpdpbusd multiplies unsigned by signed bytes: it is given x + 128, and total() takes 128 * sum(w) off again.
inline VecI dot(VecI sum, Bytes x, Bytes w) {
    const Bytes shifted = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, shifted, w);
}

inline VecI dot_offset(VecI sum, Bytes w) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi8(-128), w);
}

#elif defined(__AVX2__)

constexpr int kBytes = 16;
typedef __m128i Bytes;

inline Bytes load_bytes(const int8_t *p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

inline Bytes load_bytes(const int8_t *p, int64_t n) {
    Bytes bytes = _mm_setzero_si128();
    std::memcpy(&bytes, p, static_cast<size_t>(n));
    return bytes;
}

inline __m256i pair_products(Bytes x, Bytes w) {
    return _mm256_madd_epi16(_mm256_cvtepi8_epi16(x), _mm256_cvtepi8_epi16(w));
}

inline VecI dot(VecI sum, Bytes x, Bytes w) {
#if defined(__AVX512F__)
    return sum + (VecI)_mm512_zextsi256_si512(pair_products(x, w));
#else
    return sum + (VecI)pair_products(x, w);
#endif
}

inline VecI dot_offset(VecI sum, Bytes) {
    return sum;
}

#else // a group of four bytes in each lane, as the compiler finds it best

constexpr int kBytes = 4 * kLanes;
typedef int8_t Bytes __attribute__((vector_size(kBytes)));

inline Bytes load_bytes(const int8_t *p) {
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

inline Bytes load_bytes(const int8_t *p, int64_t n) {
    Bytes bytes = {};
    std::memcpy(&bytes, p, static_cast<size_t>(n));
    return bytes;
}

inline VecI dot(VecI sum, Bytes x, Bytes w) {
    for (int part = 0; part < 4; ++part) {
        for (int i = 0; i < kLanes; ++i) {
            sum[i] += static_cast<int>(x[part * kLanes + i]) * w[part * kLanes + i];
        }
    }
    return sum;
}

inline VecI dot_offset(VecI sum, Bytes) {
    return sum;
}

#endif

inline int32_t total(VecI sum) {
    uint32_t all = 0; // the offset of VNNI may leave int32 on the way; unsigned, it comes back
    for (int i = 0; i < kLanes; ++i) {
        all += static_cast<uint32_t>(sum[i]);
    }
    return static_cast<int32_t>(all);
}

// sums[row][column] = x row . w column, for `rows` and `columns` of them; each row and column begins at its own
// address.
template <int kTileRows, int kTileColumns>
inline void tile(const int8_t *const *x, const int8_t *const *w, int64_t k, const int32_t *offsets,
                 int32_t (*sums)[kColumns]) {
    VecI sum[kTileRows][kTileColumns] = {};
    const auto step = [&](int64_t at, auto load) {
        Bytes column[kTileColumns];
        for (int c = 0; c < kTileColumns; ++c) {
            column[c] = load(w[c] + at);
        }
        for (int r = 0; r < kTileRows; ++r) {
            const Bytes row = load(x[r] + at);
            for (int c = 0; c < kTileColumns; ++c) {
                sum[r][c] = dot(sum[r][c], row, column[c]);
            }
        }
    };
    int64_t at = 0;
    for (; at + kBytes <= k; at += kBytes) {
        step(at, [](const int8_t *p) { return load_bytes(p); });
    }
    if (at < k) {
        step(at, [&](const int8_t *p) { return load_bytes(p, k - at); });
    }
    for (int r = 0; r < kTileRows; ++r) {
        for (int c = 0; c < kTileColumns; ++c) {
            const auto raw = static_cast<uint32_t>(total(sum[r][c]));
            sums[r][c] = static_cast<int32_t>(raw - static_cast<uint32_t>(offsets[c]));
        }
    }
}

// Columns that are made contiguous at once where the weights' are not, and the rows of k that are read for that at once:
// as many cache lines as the first level holds well.
constexpr int64_t kPanelColumns = 64, kPanelDepth = 64;

bool are_columns(const TensorView &weights) {
    return weights.stride(0) == 1 || weights.size(0) <= 1;
}

void pack(const TensorView &weights, int64_t first, int64_t columns, int8_t *panel) {
    const int64_t k = weights.size(0), row = weights.stride(0), column = weights.stride(1);
    const int8_t *from = weights.as<const int8_t>() + first * column;
    for (int64_t at = 0; at < k; at += kPanelDepth) {
        const int64_t end = k - at < kPanelDepth ? k : at + kPanelDepth;
        for (int64_t c = 0; c < columns; ++c) {
            for (int64_t i = at; i < end; ++i) {
                panel[c * k + i] = from[i * row + c * column];
            }
        }
    }
}

template <typename T> void columns_of(const int8_gemm::Args &a, int64_t begin, int64_t end, int8_t *panel) {
    const int64_t m = a.x.size(0), k = a.x.size(1);
    const auto *x = a.x.as<const int8_t>(), *w = a.weights.as<const int8_t>();
    const auto *x_scale = a.x_scale.as<const float>(), *w_scale = a.weights_scale.as<const float>();
    const int64_t x_step = a.x_scale.stride(0), w_step = a.weights_scale.stride(0), bias_step = a.bias.strides[0];
    const T *bias = a.bias.dtype == INFINI_DTYPE_INVALID ? nullptr : a.bias.as<const T>();
    const bool packs = !are_columns(a.weights);
    const int64_t column_stride = packs ? k : a.weights.stride(1);
    for (int64_t n = begin; n < end; n += kColumns) {
        const int columns = static_cast<int>(end - n < kColumns ? end - n : kColumns);
        const int64_t in_panel = (n - begin) % kPanelColumns;
        if (packs && in_panel == 0) {
            pack(a.weights, n, end - n < kPanelColumns ? end - n : kPanelColumns, panel);
        }
        const int8_t *const first = packs ? panel + in_panel * k : w + n * column_stride;
        const int8_t *column[kColumns];
        int32_t offsets[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            column[c] = first + (c < columns ? c : 0) * column_stride; // one too many repeats the first
            VecI offset = {};
            int64_t at = 0;
            for (; at + kBytes <= k; at += kBytes) {
                offset = dot_offset(offset, load_bytes(column[c] + at));
            }
            offsets[c] = total(at < k ? dot_offset(offset, load_bytes(column[c] + at, k - at)) : offset);
        }
        for (int64_t r0 = 0; r0 < m; r0 += kRows) {
            const int rows = static_cast<int>(m - r0 < kRows ? m - r0 : kRows);
            const int8_t *row[kRows];
            for (int r = 0; r < kRows; ++r) {
                row[r] = x + (r0 + (r < rows ? r : 0)) * a.x.stride(0);
            }
            int32_t sums[kRows][kColumns];
            if (rows == 1) {
                tile<1, kColumns>(row, column, k, offsets, sums);
            } else {
                tile<kRows, kColumns>(row, column, k, offsets, sums);
            }
            for (int r = 0; r < rows; ++r) {
                T *out = a.out.as<T>() + (r0 + r) * a.out.stride(0) + n;
                VecF value = {};
                for (int c = 0; c < columns; ++c) {
                    value[c] = static_cast<float>(sums[r][c]) * x_scale[(r0 + r) * x_step] * w_scale[(n + c) * w_step];
                    if (bias != nullptr) {
                        value[c] += widen(bias[(n + c) * bias_step]);
                    }
                }
                store(out, value, columns);
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::int8_gemm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const int64_t m = args.x.size(0), k = args.x.size(1), n = args.weights.size(1);
    // Whole tiles for each thread; the work counts once for every few rows that share the read of a column.
    const int64_t tiles = (n + kColumns - 1) / kColumns, bytes = n * k * ((m + kRows - 1) / kRows);
    parallel_for_with_scratch(
        tiles, bytes, are_columns(args.weights) ? 0 : kPanelColumns * k,
        [&](int64_t begin, int64_t end, char *scratch) {
            auto *panel = reinterpret_cast<int8_t *>(scratch);
            const int64_t last = end * kColumns < n ? end * kColumns : n;
            with_float_type(args.out.dtype,
                            [&](auto type) { columns_of<decltype(type)>(args, begin * kColumns, last, panel); });
        },
        kProductParallelBytes);
}
