// Int8Product<F>: rows of int8 x times rows of integer weights (F: bytes, or nibbles in groups), summed exactly in
// int32, for int8_gemm and the quantized linear layers. Weights are packed into panels in VNNI's layout: word by word,
// each word of a few rows. A panel is then multiplied by up to kTileRows rows of x.
#pragma once

#include "int8_dots.h"
#include "few_rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// ---- sizes ----

// With more rows of x than a tile has, a panel is kWide vectors wide and packed whole, as many panels at once as fit
// into the L2 cache. With fewer rows memory is the limit: a panel is one vector wide, and kRunBytes of each weight row
// are packed and multiplied at a time, while the next panel is prefetched from kStreams places in turn. On a Zen 5 core
// such a loop alone (8 rows of x, 4096 -> 14336) took 1.04 to 1.4 times as long with one place, 1.7 times with 16, and
// 1.9 times without prefetching.
constexpr int kWide = 2;
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kRunBytes = 256;
constexpr int kStreamBits = 2;
constexpr int64_t kStreams = 1 << kStreamBits;

template <typename F> class Int8Product {
public:
    // For m rows of k elements; a row of the weights has `groups` groups, each of a multiple of 32 elements
    // (ByteWeights: one group).
    Int8Product(int64_t m, int64_t k, int64_t groups)
        : m_(m), k_(k), groups_(groups), few_(m, k, groups), is_few_(m <= FewRows<F>::kMaxRows) {
        row_bytes_ = (k + F::kPieces - 1) / F::kPieces;
        words_ = (row_bytes_ + 3) / 4;
        tiles_ = (m + kTileRows - 1) / kTileRows;
        vectors_ = tiles_ > 1 ? kWide : 1;
        run_words_ = tiles_ > 1 || words_ < kRunBytes / 4 ? words_ : kRunBytes / 4;
        scales_at_ = panel_rows() * 4 * F::kPieces * run_words_;
        panel_bytes_ = scales_at_ + (F::kGrouped ? 2 * panel_rows() * groups_ * 4 : 0);
        panels_ = tiles_ > 1 && panel_bytes_ > 0 && kBlockBytes / panel_bytes_ > 1 ? kBlockBytes / panel_bytes_ : 1;
    }

    // Elements of a quantized row, padded with zeros beyond k.
    int64_t padded() const { return up(few_.padded()); }
    // The memory for x, aligned to 64, and for each thread that multiplies, in bytes.
    int64_t x_bytes() const { return is_few_ ? up(few_.x_bytes()) : up(x_row_bytes() * m_) + 2 * up(m_ * groups_ * 4); }
    int64_t scratch_bytes() const { return is_few_ ? few_.scratch_bytes() : panels_ * panel_bytes_ + kSumsBytes; }
    // Weight rows per block: calls pass a multiple of these, except the last call.
    int64_t block_rows() const { return panels_ * panel_rows(); }
    void set_memory(void *x) {
        x_ = static_cast<uint8_t *>(x);
        starts_ = reinterpret_cast<int32_t *>(x_ + up(x_row_bytes() * m_));
        sums_ = reinterpret_cast<float *>(x_ + up(x_row_bytes() * m_) + up(m_ * groups_ * 4));
    }

    // Packs row `row` of x; q has padded() elements and is overwritten.
    void set_row(int64_t row, int8_t *q) {
        if (is_few_) {
            return few_.set_row(q, x_, row);
        }
        int64_t tile = row / kTileRows < tiles_ - 2 ? row / kTileRows : tiles_ > 1 ? tiles_ - 2 : 0;
        tile += row >= first_of(tile + 1) ? 1 : 0;
        const int64_t first = first_of(tile), in_tile = row - first, rows = first_of(tile + 1) - first;
        const int64_t group = groups_ > 0 ? k_ / groups_ : 0;
        for (int64_t g = 0; g < groups_; ++g) {
            int32_t sum = 0;
            for (int64_t i = g * group; i < (g + 1) * group; ++i) {
                sum += q[i];
            }
            const int64_t at = first * groups_ + g * rows + in_tile;
            starts_[at] = -F::kOffset * sum;
            sums_[at] = static_cast<float>(sum);
        }
        if constexpr (F::kPieces == 2) {
            for (int64_t i = 0; i < padded(); i += 8) {
                uint64_t bytes;
                std::memcpy(&bytes, q + i, 8);
                const uint64_t sorted = every_second(bytes) | every_second(bytes >> 8) << 32;
                std::memcpy(q + i, &sorted, 8);
            }
        }
        uint8_t *const to = x_ + first * x_row_bytes() + in_tile * 4;
        for (int64_t word = 0; word < words_ * F::kPieces; ++word) {
            std::memcpy(to + word * rows * 4, q + word * 4, 4);
        }
    }

    // Calls output(row of x, weight row, values, lanes) for all rows of x and the given weight rows, in vectors of up
    // to kLanes weight rows. Prefetches the weight rows after them.
    template <typename Scales, typename Epilogue>
    void multiply(const WeightRows &weights, const Scales &scales, char *scratch, const Epilogue &output) const {
        if constexpr (FewRows<F>::kMaxRows > 0) {
            if (is_few_) {
                return few_.multiply(x_, weights, scales, scratch, output);
            }
        }
        for (int64_t i = 0; i < weights.count; i += block_rows()) {
            const int64_t left = weights.count - i, count = left < block_rows() ? left : block_rows();
            const uint8_t *const rows = weights.data + i * weights.stride;
            const WeightRows block{rows, weights.stride, weights.first + i, count};
            if (tiles_ > 1) {
                multiply_block<kWide>(block, rows + count * weights.stride, scales, scratch, output);
            } else {
                multiply_block<1>(block, rows + count * weights.stride, scales, scratch, output);
            }
        }
    }

private:
    static constexpr int kTileRows = F::kTileRows;
    // Kept between the runs of a panel: the sums of each row of x and each vector of the panel.
    static constexpr int64_t kSumsBytes = kTileRows * kWide * kVectorBytes;

    static constexpr int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }
    static uint64_t every_second(uint64_t bytes) {
        bytes &= 0x00ff00ff00ff00ffu;
        bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
        return (bytes | bytes >> 16) & 0xffffffffu;
    }
    // The first row of x of a tile. All tiles are full but the last two, which share the rest evenly, so that tiles of
    // few rows need no code.
    int64_t first_of(int64_t tile) const {
        if (tile >= tiles_) {
            return m_;
        }
        return tile + 1 < tiles_ || tile == 0 ? tile * kTileRows : m_ - (m_ - (tile - 1) * kTileRows) / 2;
    }
    int64_t x_row_bytes() const { return words_ * F::kPieces * 4; }
    int64_t panel_rows() const { return vectors_ * kLanes; }

    // ---- packing ----

    // Packs words [first, first + count) of the weight rows: one word of all rows, then the next.
    template <int kVectors> void pack(const WeightRows &weights, int64_t first, int64_t count, uint8_t *panel) const {
        const int64_t bytes = row_bytes_ - first * 4 < count * 4 ? row_bytes_ - first * 4 : count * 4;
        for (int v = 0; v < kVectors; ++v, panel += kVectorBytes) {
            const uint8_t *from = weights.data + row_at(weights, v * kLanes) * weights.stride + first * 4;
            uint8_t *to = panel;
            int64_t left = bytes;
            if ((v + 1) * kLanes <= weights.count) {
                for (; left >= kVectorBytes; left -= kVectorBytes, from += kVectorBytes) {
                    VecU words[kLanes];
                    const uint8_t *row = from;
#pragma GCC unroll 16
                    for (int i = 0; i < kLanes; ++i, row += weights.stride) {
                        words[i] = load_bytes(row);
                    }
                    transpose(words);
#pragma GCC unroll 16
                    for (int i = 0; i < kLanes; ++i) {
                        to = put_word<kVectors>(words[i], to);
                    }
                }
            }
            for (; left > 0; left -= kVectorBytes, from += kVectorBytes) { // the last rows, or their ends
                VecU words[kLanes];
                for (int i = 0; i < kLanes; ++i) {
                    const int64_t row = row_at(weights, v * kLanes + i) - row_at(weights, v * kLanes);
                    words[i] = load_bytes(from + row * weights.stride, left < kVectorBytes ? left : kVectorBytes);
                }
                transpose(words);
                for (int i = 0; i < kLanes && 4 * i < left; ++i) {
                    to = put_word<kVectors>(words[i], to);
                }
            }
        }
    }

    template <int kVectors> INFINI_ALWAYS_INLINE static uint8_t *put_word(VecU word, uint8_t *to) {
        VecU bytes[F::kPieces];
        F::split(word, bytes);
        for (int piece = 0; piece < F::kPieces; ++piece) {
            std::memcpy(to, &bytes[piece], sizeof bytes[piece]);
            to += kVectors * kVectorBytes;
        }
        return to;
    }

    // ---- multiplying ----

    // A run: some words of a panel and of a tile of x; whole groups.
    struct Run {
        int64_t word, words; // the first, and the count
        const uint8_t *panel, *x;
        const int32_t *starts;                  // initial values of the sums: [group, row of x]
        const float *x_sums;                    // [group, row of x]
        const float *scales, *zeros;            // [group, weight row]; zeros may be null
        const uint8_t *next;                    // prefetched: a line per word, from kStreams places
        int64_t next_apart, next_step;          // the distance of those places; the step along each
        int64_t first_row, first_column, count; // of the result, and how many columns there are
        void *kept;                             // sums that are kept between the runs of a panel
    };

    // sums += `words` words of a panel times those of kM rows of x. Advances panel and x past them.
    template <int kVectors, int kM>
    INFINI_ALWAYS_INLINE void add_words(const Run &t, int64_t word, int64_t words, const uint8_t *&panel,
                                        const uint8_t *&x, VecI (&sums)[kM][kVectors]) const {
        for (const int64_t end = word + words; word < end; ++word) {
            prefetch_weight(t.next + (word & (kStreams - 1)) * t.next_apart + (word >> kStreamBits) * t.next_step,
                            far_);
#pragma GCC unroll 2
            for (int piece = 0; piece < F::kPieces; ++piece) {
                VecU columns[kVectors];
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    columns[v] = load_bytes(panel + v * kVectorBytes);
                }
#pragma GCC unroll 12
                for (int m = 0; m < kM; ++m) {
                    const VecI row = splat_word(x + m * 4);
#pragma GCC unroll 2
                    for (int v = 0; v < kVectors; ++v) {
                        sums[m][v] = F::add_products(sums[m][v], columns[v], row);
                    }
                }
                panel += kVectors * kVectorBytes;
                x += kM * 4;
            }
        }
    }

    template <int kVectors, int kM, typename Epilogue>
    __attribute__((noinline)) void multiply_run(const Run &t, const Epilogue &output) const {
        const uint8_t *panel = t.panel, *x = t.x;
        const bool last = t.word + t.words == words_;
        if constexpr (F::kGrouped) {
            auto *const totals = static_cast<VecF *>(t.kept); // [row, vector]
            const int64_t words = words_ > 0 ? words_ / groups_ : 1, end = (t.word + t.words) / words;
            for (int64_t g = t.word / words; g < end; ++g) {
                VecI sums[kM][kVectors];
#pragma GCC unroll 12
                for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                    for (int v = 0; v < kVectors; ++v) {
                        sums[m][v] = splat_word(t.starts + g * kM + m);
                    }
                }
                add_words(t, g * words, words, panel, x, sums);
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    const VecF scale = load(t.scales + (g * kVectors + v) * kLanes);
                    const VecF zero = t.zeros ? load(t.zeros + (g * kVectors + v) * kLanes) : VecF{};
#pragma GCC unroll 12
                    for (int m = 0; m < kM; ++m) {
                        VecF scaled = scale * __builtin_convertvector(sums[m][v], VecF);
                        if (t.zeros) {
                            scaled += zero * splat(t.x_sums[g * kM + m]);
                        }
                        VecF &total = totals[m * kVectors + v];
                        total = g == 0 ? VecF{} + scaled : total + scaled;
                    }
                }
            }
            if (last) {
                for (int i = 0; i < kM * kVectors; ++i) {
                    put(t, output, i / kVectors, i % kVectors, groups_ > 0 ? totals[i] : VecF{});
                }
            }
        } else {
            auto *const kept = static_cast<VecI *>(t.kept);
            VecI sums[kM][kVectors];
#pragma GCC unroll 12
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    sums[m][v] = t.word == 0 ? splat_word(t.starts + m) : kept[m * kVectors + v];
                }
            }
            add_words(t, t.word, t.words, panel, x, sums);
#pragma GCC unroll 12
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    if (last) {
                        put(t, output, m, v, __builtin_convertvector(sums[m][v], VecF));
                    } else {
                        kept[m * kVectors + v] = sums[m][v];
                    }
                }
            }
        }
    }

    template <typename Epilogue>
    static void put(const Run &t, const Epilogue &output, int64_t m, int64_t v, VecF value) {
        const int64_t column = t.first_column + v * kLanes, left = t.count - v * kLanes;
        if (left >= kLanes) {
            output(t.first_row + m, column, value, Full{});
        } else if (left > 0) {
            output(t.first_row + m, column, value, static_cast<int>(left));
        }
    }

    // The fewest rows of a tile: one of several tiles has at least half of kTileRows, a single tile more than few_
    // takes.
    static constexpr int fewest_rows(int vectors) {
        return vectors > 1 ? (kTileRows + 1) / 2 : static_cast<int>(FewRows<F>::kMaxRows) + 1;
    }

    // The same with a number of rows of x known at run time.
    template <int kVectors, typename Epilogue, int kM = fewest_rows(kVectors)>
    void multiply_run(int64_t m, const Run &t, const Epilogue &output) const {
        if constexpr (kM < kTileRows) {
            if (m > kM) {
                return multiply_run<kVectors, Epilogue, kM + 1>(m, t, output);
            }
        }
        multiply_run<kVectors, kM>(t, output);
    }

    template <int kVectors, typename Scales, typename Epilogue>
    void multiply_block(const WeightRows &weights, const uint8_t *next, const Scales &scales, char *scratch,
                        const Epilogue &output) const {
        constexpr int64_t kRows = kVectors * kLanes;
        auto *const panels = reinterpret_cast<uint8_t *>(scratch + kSumsBytes);
        const auto rows_at = [&](int64_t i) {
            const int64_t left = weights.count - i;
            return WeightRows{weights.data + i * weights.stride, weights.stride, weights.first + i,
                              left < kRows ? left : kRows};
        };
        bool zeros = false;
        for (int64_t i = 0, panel = 0; i < weights.count; i += kRows, ++panel) {
            if constexpr (F::kGrouped) {
                auto *const to = reinterpret_cast<float *>(panels + panel * panel_bytes_ + scales_at_);
                pack_scales<kVectors>(rows_at(i), groups_, scales, to);
                zeros = scales.has_zeros();
            }
            if (kVectors > 1) {
                pack<kVectors>(rows_at(i), 0, words_, panels + panel * panel_bytes_);
            }
        }
        // Unless there is a single tile, each run prefetches its share of the next panel.
        const int64_t calls = tiles_ * ((weights.count + kRows - 1) / kRows);
        const int64_t apart = weights.count * weights.stride / kStreams, share = apart / calls;
        const int64_t step = words_ > 0 ? share * kStreams / words_ : 0;
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            const int64_t first = first_of(tile), rows = first_of(tile + 1) - first;
            for (int64_t i = 0, panel = 0; i < weights.count; i += kRows, ++panel, next += share) {
                const WeightRows held = rows_at(i);
                uint8_t *const at = panels + panel * panel_bytes_;
                const auto *const panel_scales = reinterpret_cast<const float *>(at + scales_at_);
                int64_t word = 0;
                do {
                    const int64_t words = words_ - word < run_words_ ? words_ - word : run_words_;
                    if (kVectors == 1) {
                        pack<kVectors>(held, word, words, at);
                    }
                    multiply_run<kVectors>(rows,
                                           {word, words, at, x_ + first * x_row_bytes() + word * F::kPieces * rows * 4,
                                            starts_ + first * groups_, sums_ + first * groups_, panel_scales,
                                            zeros ? panel_scales + groups_ * kRows : nullptr, next, apart, step, first,
                                            held.first, held.count, scratch},
                                           output);
                    word += words;
                } while (word < words_);
            }
        }
    }

    int64_t m_, k_, groups_;
    bool far_ = weight_reading() == WeightReading::kOnePlace;
    int64_t row_bytes_, words_; // of a weight row
    int64_t tiles_;             // of x
    int64_t vectors_, run_words_, scales_at_, panel_bytes_, panels_;
    FewRows<F> few_;
    bool is_few_;
    uint8_t *x_ = nullptr;
    int32_t *starts_ = nullptr;
    float *sums_ = nullptr;
};

} // namespace
} // namespace infini::INFINI_LEVEL
