// Product<F>: rows of int8 x against rows of integer weights (F: bytes, or nibbles in groups), summed exactly in int32;
// what int8_gemm and the quantised linear layers have in common. Few rows of x meet the weights where they lie, along
// k; for many, the weights are brought into the order of VNNI's instruction first.
#pragma once

#include "dense_rows.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// sum + the products of unsigned and signed bytes, four to a lane; wraps around.
inline VecI dot(VecI sum, VecU unsigned_bytes, VecI signed_bytes) {
#if defined(__AVX512VNNI__)
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
    const VecU even = unsigned_bytes & 0x00ff00ffu, odd = unsigned_bytes >> 8 & 0x00ff00ffu;
#if defined(__AVX512F__)
    const __m512i s = (__m512i)signed_bytes;
    const VecU evens = (VecU)_mm512_madd_epi16((__m512i)even, _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const VecU odds = (VecU)_mm512_madd_epi16((__m512i)odd, _mm512_srai_epi16(s, 8));
#else
    const __m256i s = (__m256i)signed_bytes;
    const VecU evens = (VecU)_mm256_madd_epi16((__m256i)even, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const VecU odds = (VecU)_mm256_madd_epi16((__m256i)odd, _mm256_srai_epi16(s, 8));
#endif
    return (VecI)((VecU)sum + evens + odds);
#else
    VecU total = (VecU)sum;
    for (int byte = 0; byte < 4; ++byte) {
        const VecI factor = (VecI)((VecU)signed_bytes << (24 - 8 * byte)) >> 24;
        total += (unsigned_bytes >> (8 * byte) & 0xffu) * (VecU)factor;
    }
    return (VecI)total;
#endif
}

inline VecU load_bytes(const void *p) {
    VecU bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

// The first n bytes; the others are 0.
inline VecU load_bytes(const void *p, int64_t n) {
    VecU bytes{};
    std::memcpy(&bytes, p, static_cast<size_t>(n));
    return bytes;
}

inline VecI splat_word(const void *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return VecI{} + word;
}

constexpr int64_t kVectorBytes = 4 * kLanes;

// ---- formats ----

struct ByteWeights {
    static constexpr int kPieces = 1;       // what a vector of stored weights becomes: vectors of bytes
    static constexpr int kOffset = 128;     // that makes them unsigned
    static constexpr bool kGrouped = false; // a scale for a row, which the output applies
    static void split(VecU stored, VecU (&bytes)[kPieces]) { bytes[0] = stored ^ 0x80808080u; }
};

// Two to a byte; eight elements in a word of which the even ones come first.
struct NibbleWeights {
    static constexpr int kPieces = 2;
    static constexpr int kOffset = 8;
    static constexpr bool kGrouped = true; // a scale for a group of a row
    static void split(VecU stored, VecU (&bytes)[kPieces]) {
        bytes[0] = stored & 0x0f0f0f0fu;
        bytes[1] = stored >> 4 & 0x0f0f0f0fu;
    }
};

// What NibbleWeights need besides, and others do not have: scales(row, group, lanes) and zeros(...), kLanes groups of a
// weight row; has_zeros(); of_lanes(scales), those of the lanes of a step of kLanes words.
struct NoScales {};

// ---- sizes ----

// Up to this many rows of x the weights are read where they lie: bringing them into order would cost more than it saves.
constexpr int64_t kInPlaceRows = 16;
constexpr int kInPlaceTile = kLanes == 16 ? 8 : 4; // rows of x that meet two weight rows in registers
constexpr int kPanelTile = kLanes == 16 ? 12 : 4;  // rows of x that meet a panel
constexpr int kPanelVectors = 2;
constexpr int64_t kPanelRows = kPanelVectors * kLanes; // of weights that lie side by side, word by word
constexpr int64_t kBlockBytes = 256 * 1024;            // of panels: they stay in the L2 cache

// Weight rows [first, first + count) at `data`.
struct WeightRows {
    const uint8_t *data;
    int64_t stride, first, count;
};

template <typename F> class Product {
public:
    // For m rows of k elements, of which `groups` groups have scales of their own.
    Product(int64_t m, int64_t k, int64_t groups) : m_(m), k_(k), groups_(groups) {
        row_bytes_ = (k + F::kPieces - 1) / F::kPieces;
        words_ = (row_bytes_ + 3) / 4;
        steps_ = (words_ + kLanes - 1) / kLanes;
        in_place_ = m <= kInPlaceRows;
        const int64_t most = in_place_ ? kInPlaceTile : kPanelTile;
        tiles_ = (m + most - 1) / most;
        tile_rows_ = tiles_ > 0 ? (m + tiles_ - 1) / tiles_ : 0;
        x_row_bytes_ = in_place_ ? steps_ * kInPlaceVectors * kVectorBytes : words_ * F::kPieces * 4;
        panel_bytes_ = kPanelRows * (words_ * F::kPieces * 4 + (F::kGrouped ? groups * 8 : 0));
        panels_ = panel_bytes_ > 0 && kBlockBytes / panel_bytes_ > 1 ? kBlockBytes / panel_bytes_ : 1;
    }

    // Elements of a quantised row, zeros beyond k.
    int64_t padded() const { return steps_ * kVectorBytes * F::kPieces; }
    // Memory for x, aligned to 64; and for each thread that multiplies.
    int64_t x_bytes() const { return up(m_ * x_row_bytes_) + 2 * up(m_ * group_pitch() * 4); }
    int64_t scratch_bytes() const {
        return in_place_
                   ? kVectorBytes * kInPlaceTile * kLanes + (F::kGrouped ? kHeld * (group_pitch() + kLanes) * 4 : 0)
                   : panels_ * panel_bytes_;
    }
    bool in_place() const { return in_place_; }
    // Weight rows that are multiplied in one call.
    int64_t block_rows() const { return in_place_ ? kLanes : panels_ * kPanelRows; }
    void set_memory(void *x) {
        x_ = static_cast<uint8_t *>(x);
        starts_ = reinterpret_cast<int32_t *>(x_ + up(m_ * x_row_bytes_));
        sums_ = reinterpret_cast<float *>(x_ + up(m_ * x_row_bytes_) + up(m_ * group_pitch() * 4));
    }

    // Row `row` of x; q has padded() elements and is changed.
    void set_row(int64_t row, int8_t *q) {
        const int64_t tile = row / tile_rows_, in_tile = row % tile_rows_, rows = rows_of(tile);
        if constexpr (F::kPieces == 2) {
            for (int64_t i = 0; i < padded(); i += 8) {
                uint64_t bytes;
                std::memcpy(&bytes, q + i, 8);
                const uint64_t sorted = every_second(bytes) | every_second(bytes >> 8) << 32;
                std::memcpy(q + i, &sorted, 8);
            }
        }
        const int64_t group = groups_ > 0 ? k_ / groups_ : 0;
        for (int64_t g = 0; g < groups_; ++g) {
            int32_t sum = 0;
            for (int64_t i = g * group; i < (g + 1) * group; ++i) {
                sum += q[i];
            }
            const int64_t at = in_place_ ? row * group_pitch() + g : tile * tile_rows_ * groups_ + g * rows + in_tile;
            starts_[at] = -F::kOffset * sum;
            sums_[at] = static_cast<float>(sum);
        }
        uint8_t *const to = x_ + tile * tile_rows_ * x_row_bytes_;
        if (!in_place_) {
            for (int64_t word = 0; word < words_ * F::kPieces; ++word) {
                std::memcpy(to + (word * rows + in_tile) * 4, q + word * 4, 4);
            }
            return;
        }
        for (int64_t g = groups_; g < group_pitch(); ++g) {
            sums_[row * group_pitch() + g] = 0;
        }
        for (int64_t step = 0; step < steps_; ++step) {
            uint8_t *const vectors = to + (step * rows + in_tile) * kInPlaceVectors * kVectorBytes;
            const int8_t *const from = q + step * F::kPieces * kVectorBytes;
            if constexpr (F::kPieces == 1) {
                std::memcpy(vectors, from, kVectorBytes);
            } else {
                VecI pieces[2], start{};
                for (int lane = 0; lane < kLanes; ++lane) {
                    for (int piece = 0; piece < 2; ++piece) {
                        int32_t word;
                        std::memcpy(&word, from + (2 * lane + piece) * 4, 4);
                        pieces[piece][lane] = word;
                    }
                }
                for (const VecI &piece : pieces) {
                    start = dot(start, VecU{} + 0x01010101u, piece);
                }
                start *= -F::kOffset;
                std::memcpy(vectors, pieces, sizeof pieces);
                std::memcpy(vectors + sizeof pieces, &start, sizeof start);
            }
        }
    }

    // output(row of x, weight row, values, lanes) for all rows of x and the weight rows given, kLanes of them at a time.
    // next: what will be multiplied afterwards, and is prefetched.
    template <typename Scales, typename Output>
    void multiply(const WeightRows &weights, const uint8_t *next, const Scales &scales, char *scratch,
                  const Output &output) const {
        if (in_place_) {
            for (int64_t i = 0; i < weights.count; i += kLanes) {
                const int64_t count = weights.count - i < kLanes ? weights.count - i : kLanes;
                const uint8_t *const data = weights.data + i * weights.stride;
                multiply_in_place({data, weights.stride, weights.first + i, count},
                                  i + kLanes < weights.count ? data + kLanes * weights.stride : next, scales, scratch,
                                  output);
            }
        } else {
            multiply_packed(weights, next, scales, scratch, output);
        }
    }

private:
    // ByteWeights: x; NibbleWeights: its even and odd elements, and -kOffset times the sums of the lanes.
    static constexpr int kInPlaceVectors = F::kPieces == 1 ? 1 : 3;
    static constexpr int kHeld = 2; // weight rows in registers

    static constexpr int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }
    static uint64_t every_second(uint64_t bytes) {
        bytes &= 0x00ff00ff00ff00ffu;
        bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
        return (bytes | bytes >> 16) & 0xffffffffu;
    }
    int64_t rows_of(int64_t tile) const { return tile + 1 < tiles_ ? tile_rows_ : m_ - tile * tile_rows_; }
    int64_t group_pitch() const { return in_place_ ? (groups_ + kLanes - 1) / kLanes * kLanes : groups_; }

    // ---- few rows: dot products along k ----

    struct InPlace {
        WeightRows weights; // kHeld rows
        const uint8_t *x;
        const float *x_sums; // of each row, group_pitch() sums
        const uint8_t *next;
        const float *scales; // of each weight row, group_pitch() + kLanes
        void *sums;          // vectors, of row m and weight row r: sums[m * kLanes + r]
    };

    template <int kM, typename Scales>
    __attribute__((noinline)) void multiply_tile(const InPlace &t, const Scales &scales) const {
        using Sum = std::conditional_t<F::kGrouped, VecF, VecI>;
        Sum sums[kHeld][kM] = {};
        const int64_t stride = t.weights.stride;
        if constexpr (F::kGrouped) {
            if (scales.has_zeros()) {
                for (int r = 0; r < kHeld; ++r) {
                    for_each_vector(groups_, [&](int64_t g, auto lanes) {
                        const VecF zeros = scales.zeros(t.weights.first + (stride > 0 ? r : 0), g, lanes);
                        for (int m = 0; m < kM; ++m) {
                            sums[r][m] = fma(zeros, load(t.x_sums + m * group_pitch() + g), sums[r][m]);
                        }
                    });
                }
            }
        }
        const uint8_t *x = t.x;
        const auto step = [&](int64_t at, auto... n) __attribute__((always_inline)) {
            VecU weights[kHeld][F::kPieces];
            VecF lane_scales[kHeld];
#pragma GCC unroll 2
            for (int r = 0; r < kHeld; ++r) {
                __builtin_prefetch(t.next + r * stride + at);
                F::split(load_bytes(t.weights.data + r * stride + at, n...), weights[r]);
                if constexpr (F::kGrouped) {
                    lane_scales[r] = scales.of_lanes(t.scales + r * (group_pitch() + kLanes), at * F::kPieces);
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m, x += kInPlaceVectors * kVectorBytes) {
                VecI row[kInPlaceVectors];
#pragma GCC unroll 3
                for (int i = 0; i < kInPlaceVectors; ++i) {
                    row[i] = (VecI)load_bytes(x + i * kVectorBytes);
                }
#pragma GCC unroll 2
                for (int r = 0; r < kHeld; ++r) {
                    if constexpr (F::kGrouped) {
                        const VecI sum = dot(dot(row[2], weights[r][0], row[0]), weights[r][1], row[1]);
                        sums[r][m] = fma(lane_scales[r], __builtin_convertvector(sum, VecF), sums[r][m]);
                    } else {
                        sums[r][m] = dot(sums[r][m], weights[r][0], row[0]);
                    }
                }
            }
        };
        int64_t at = 0;
        for (; at + kVectorBytes <= row_bytes_; at += kVectorBytes) {
            step(at);
        }
        if (at < row_bytes_) {
            step(at, row_bytes_ - at);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
            for (int r = 0; r < kHeld; ++r) {
                static_cast<Sum *>(t.sums)[m * kLanes + r] = sums[r][m];
            }
        }
    }

    template <typename Scales, int kM = 1> void multiply_tile(int64_t m, const InPlace &t, const Scales &scales) const {
        if constexpr (kM < kInPlaceTile) {
            if (m > kM) {
                return multiply_tile<Scales, kM + 1>(m, t, scales);
            }
        }
        multiply_tile<kM>(t, scales);
    }

    // At most kLanes weight rows.
    template <typename Scales, typename Output>
    void multiply_in_place(const WeightRows &weights, const uint8_t *next, const Scales &scales, char *scratch,
                           const Output &output) const {
        char *const sums = scratch;
        auto *const row_scales = reinterpret_cast<float *>(scratch + kVectorBytes * kInPlaceTile * kLanes);
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            const int64_t rows = rows_of(tile), first = tile * tile_rows_;
            for (int64_t i = 0; i < weights.count; i += kHeld) {
                // The last of an odd number of rows meets itself again.
                const int64_t stride = i + 1 < weights.count ? weights.stride : 0;
                const WeightRows held{weights.data + i * weights.stride, stride, weights.first + i, kHeld};
                if constexpr (F::kGrouped) {
                    for (int r = 0; r < kHeld; ++r) {
                        float *const to = row_scales + r * (group_pitch() + kLanes);
                        for_each_vector(groups_, [&](int64_t g, auto lanes) {
                            store(to + g, scales.scales(held.first + (stride > 0 ? r : 0), g, lanes));
                        });
                        store(to + group_pitch(), VecF{});
                    }
                }
                multiply_tile(rows,
                              {held, x_ + first * x_row_bytes_, sums_ + first * group_pitch(),
                               next + i * weights.stride, row_scales, sums + i * kVectorBytes},
                              scales);
            }
            for (int64_t m = 0; m < rows; ++m) {
                VecF total;
                const char *const lanes = sums + m * kLanes * kVectorBytes;
                if constexpr (F::kGrouped) {
                    total = infini::INFINI_LEVEL::sums(
                        [&](int i) { return load(reinterpret_cast<const float *>(lanes) + i * kLanes); });
                } else {
                    VecU words[kLanes], all = VecU{} + static_cast<uint32_t>(starts_[(first + m) * group_pitch()]);
                    std::memcpy(words, lanes, sizeof words);
                    swap_quarters<kLanes / 2>(words, std::make_integer_sequence<int, kLanes>{});
                    for (const VecU &word : words) {
                        all += word;
                    }
                    total = __builtin_convertvector((VecI)all, VecF);
                }
                put(first + m, weights.first, total, weights.count, output);
            }
        }
    }

    template <typename Output>
    static void put(int64_t row, int64_t column, VecF values, int64_t count, const Output &output) {
        if (count >= kLanes) {
            output(row, column, values, Full{});
        } else if (count > 0) {
            output(row, column, values, static_cast<int>(count));
        }
    }

    // ---- many rows: panels ----

    // Of the weight rows' words, one after the other: that word of kPanelRows rows; then the same of scales and zeros.
    template <typename Scales> void pack_panel(const WeightRows &weights, const Scales &scales, uint8_t *panel) const {
        for (int v = 0; v < kPanelVectors; ++v) {
            const uint8_t *rows[kLanes];
            for (int i = 0; i < kLanes; ++i) { // beyond the last one, that again
                const int64_t row = v * kLanes + i;
                rows[i] = weights.data + (row < weights.count ? row : weights.count - 1) * weights.stride;
            }
            for (int64_t at = 0; at < row_bytes_; at += kVectorBytes) {
                VecU words[kLanes];
                const int64_t left = row_bytes_ - at;
                for (int i = 0; i < kLanes; ++i) {
                    words[i] = left >= kVectorBytes ? load_bytes(rows[i] + at) : load_bytes(rows[i] + at, left);
                }
                swap_quarters<kLanes / 2>(words, std::make_integer_sequence<int, kLanes>{});
                uint8_t *to = panel + (at / 4 * F::kPieces * kPanelVectors + v) * kVectorBytes;
                for (int i = 0; i < kLanes && 4 * i < left; ++i) {
                    VecU bytes[F::kPieces];
                    F::split(words[i], bytes);
                    for (int piece = 0; piece < F::kPieces; ++piece) {
                        std::memcpy(to, &bytes[piece], sizeof bytes[piece]);
                        to += kPanelVectors * kVectorBytes;
                    }
                }
            }
            if constexpr (F::kGrouped) {
                auto *const to = reinterpret_cast<float *>(panel + panel_scales()) + v * kLanes;
                const auto row = [&](int i) {
                    const int64_t at = v * kLanes + i;
                    return weights.first + (at < weights.count ? at : weights.count - 1);
                };
                pack_scales([&](int i, int64_t g, auto lanes) { return scales.scales(row(i), g, lanes); }, to);
                if (scales.has_zeros()) {
                    pack_scales([&](int i, int64_t g, auto lanes) { return scales.zeros(row(i), g, lanes); },
                                to + groups_ * kPanelRows);
                }
            }
        }
    }

    // to[g * kPanelRows + i] = group g of row i.
    template <typename Load> void pack_scales(const Load &load_row, float *to) const {
        for_each_vector(groups_, [&](int64_t g, auto lanes) {
            VecU rows[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                rows[i] = (VecU)load_row(i, g, lanes);
            }
            swap_quarters<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>{});
            for (int i = 0; i < lanes; ++i) {
                store(to + (g + i) * kPanelRows, (VecF)rows[i]);
            }
        });
    }

    int64_t panel_scales() const { return kPanelRows * words_ * F::kPieces * 4; }

    struct Panel {
        const uint8_t *weights, *x;
        const int32_t *starts; // of the sums: [group, row]
        const float *x_sums;   // of each group and row; used only with zeros
        bool zeros;
        int64_t row, column, columns;
        const uint8_t *next;
        int64_t next_step;
    };

    template <int kM, typename Output>
    __attribute__((noinline)) void multiply_panel(const Panel &t, const Output &output) const {
        const uint8_t *weights = t.weights, *x = t.x, *next = t.next;
        const auto *scales = reinterpret_cast<const float *>(t.weights + panel_scales());
        const int64_t words = groups_ > 0 ? words_ * F::kPieces / groups_ : 0;
        VecF totals[kM][kPanelVectors] = {};
        for (int64_t g = 0; g < groups_; ++g) {
            VecI sums[kM][kPanelVectors];
#pragma GCC unroll 12
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int v = 0; v < kPanelVectors; ++v) {
                    sums[m][v] = splat_word(t.starts + g * kM + m);
                }
            }
            for (int64_t word = 0; word < words; ++word) {
                __builtin_prefetch(next);
                next += t.next_step;
                VecU columns[kPanelVectors];
#pragma GCC unroll 2
                for (int v = 0; v < kPanelVectors; ++v) {
                    columns[v] = load_bytes(weights + v * kVectorBytes);
                }
#pragma GCC unroll 12
                for (int m = 0; m < kM; ++m) {
                    const VecI row = splat_word(x + m * 4);
#pragma GCC unroll 2
                    for (int v = 0; v < kPanelVectors; ++v) {
                        sums[m][v] = dot(sums[m][v], columns[v], row);
                    }
                }
                weights += kPanelVectors * kVectorBytes;
                x += kM * 4;
            }
#pragma GCC unroll 12
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int v = 0; v < kPanelVectors; ++v) {
                    const VecF sum = __builtin_convertvector(sums[m][v], VecF);
                    if constexpr (F::kGrouped) {
                        const float *const scale = scales + g * kPanelRows + v * kLanes;
                        totals[m][v] = fma(load(scale), sum, totals[m][v]);
                        if (t.zeros) {
                            const VecF zero = load(scale + groups_ * kPanelRows);
                            totals[m][v] = fma(zero, splat(t.x_sums[g * kM + m]), totals[m][v]);
                        }
                    } else {
                        totals[m][v] = sum;
                    }
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
            for (int v = 0; v < kPanelVectors; ++v) {
                put(t.row + m, t.column + v * kLanes, totals[m][v], t.columns - v * kLanes, output);
            }
        }
    }

    template <typename Output, int kM = 1> void multiply_panel(int64_t m, const Panel &t, const Output &output) const {
        if constexpr (kM < kPanelTile) {
            if (m > kM) {
                return multiply_panel<Output, kM + 1>(m, t, output);
            }
        }
        multiply_panel<kM>(t, output);
    }

    template <typename Scales, typename Output>
    void multiply_packed(const WeightRows &weights, const uint8_t *next, const Scales &scales, char *scratch,
                         const Output &output) const {
        auto *const panels = reinterpret_cast<uint8_t *>(scratch);
        const auto panel_rows = [&](int64_t i) {
            return WeightRows{weights.data + i * weights.stride, weights.stride, weights.first + i,
                              weights.count - i < kPanelRows ? weights.count - i : kPanelRows};
        };
        for (int64_t i = 0, panel = 0; i < weights.count; i += kPanelRows, ++panel) {
            pack_panel(panel_rows(i), scales, panels + panel * panel_bytes_);
        }
        bool zeros = false;
        if constexpr (F::kGrouped) {
            zeros = scales.has_zeros();
        }
        // Each call prefetches its share of the next block.
        const int64_t calls = tiles_ * ((weights.count + kPanelRows - 1) / kPanelRows);
        const int64_t share = calls > 0 ? weights.count * weights.stride / calls : 0;
        const int64_t next_step = words_ > 0 ? share / (words_ * F::kPieces) : 0;
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            const int64_t first = tile * tile_rows_;
            for (int64_t i = 0, panel = 0; i < weights.count; i += kPanelRows, ++panel, next += share) {
                const WeightRows rows = panel_rows(i);
                multiply_panel(rows_of(tile),
                               {panels + panel * panel_bytes_, x_ + first * x_row_bytes_, starts_ + first * groups_,
                                sums_ + first * groups_, zeros, first, rows.first, rows.count, next, next_step},
                               output);
            }
        }
    }

    int64_t m_, k_, groups_;
    int64_t row_bytes_, words_, steps_; // of a weight row: bytes, words, vectors of words
    bool in_place_;
    int64_t tiles_, tile_rows_, x_row_bytes_;
    int64_t panels_, panel_bytes_;
    uint8_t *x_ = nullptr;
    int32_t *starts_ = nullptr;
    float *sums_ = nullptr;
};

} // namespace
} // namespace infini::INFINI_LEVEL
