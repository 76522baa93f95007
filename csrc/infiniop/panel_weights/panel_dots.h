// The kernel of products with weights in panels: x becomes int8 with a scale for each run of columns, weights become
// bytes, and dot products of four bytes are added to a lane, which stands for a row of the weight.
// Weights: a Layout with unpack(lines of a block, pair, vector of a line, VecU (&)[2]), which gives columns 8 * pair to
// 8 * pair + 3 and the next 4. They are kOffset larger if bytes are multiplied as unsigned ones: sums then start at
// -kOffset times the group's sum of x. add_products(sum, columns, x) adds the products.
// The sum of a group times its scale, and the total of these over a run, are exact in int32; runs are added in float,
// in order. So a row has the same bits at every level, in any call.
// Limit: memory bandwidth for up to 4 rows, the multiply-adds of bytes for many.
#pragma once

#include "int8_gemm/int8_dots.h"
#include "panel_passes.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kMaxRows = 256; // rows of x that are quantized at once: about 1 MB for k up to 4096
constexpr int kPairs = kBlock / 8, kGroupPairs = kPairs / kBlockGroups; // pairs: 4 columns and the next 4

// kTileRows: rows of x that are multiplied together. Panels are multiplied as they are read for up to kFewRows rows;
// for more, each run of columns is unpacked first. kAddsPairs: weights are at most 64, unsigned by kOffset, so products
// of eight columns are added in 16 bits.
#if defined(INFINI_SCALED_PAIRS)
// On a Zen 3 core, 2048 -> 5632, table4 took 1.14 times as long with three rows, and 1.73 with eight, before both
// (group8 1.25 with five rows, 1.42 with eight), and 1.2 with 64 (by hand, in turns).
constexpr int kTileRows = 8;
template <typename Weights> constexpr bool kAddsPairs = Weights::kOffset != 0;
template <typename Weights> constexpr int kFewRows = kAddsPairs<Weights> ? 2 : 4;
#else
constexpr int kTileRows = kManyRegisters ? 8 : 4;
template <typename Weights> constexpr bool kAddsPairs = false;
template <typename Weights> constexpr int kFewRows = kTileRows;
#endif

// Per group of a row of x: the start of its sum, then the columns; or for each pair the columns, then what is added to
// their products.
template <typename Weights> constexpr int kGroupWords = kAddsPairs<Weights> ? 3 * kGroupPairs : 1 + kGroup / 4;

constexpr int64_t kAheadBytes = 2048;

// ---- x ----

// m quantized rows of x; kTileRows rows are interleaved, so that one register points to all of them. Per group, of each
// row: -kOffset times the group's sum, then 4 columns, then the next 4; if kAddsPairs, 4 columns, the next 4, and
// -kOffset times the sums of two columns of each, in 16 bits. Columns beyond k are 0. Per run: the scale of each row.
template <typename Weights> class QuantizedRows {
public:
    static constexpr int64_t kRun = Weights::kRun;

    QuantizedRows(int64_t m, int64_t k)
        : m_(m), k_(k), blocks_((k + kBlock - 1) / kBlock), runs_((k + kRun - 1) / kRun) {}

    int64_t blocks() const { return blocks_; }
    int64_t bytes() const { return (m_ * (words() + runs_) * 4 + 63) / 64 * 64; }
    void set_memory(void *memory) { memory_ = static_cast<int32_t *>(memory); }
    // [group, kGroupWords, rows of the tile]
    int32_t *groups(int64_t tile) const { return memory_ + tile * kTileRows * words(); }
    // [run, rows of the tile]
    float *scales(int64_t tile) const {
        return reinterpret_cast<float *>(memory_ + m_ * words()) + tile * kTileRows * runs_;
    }

    template <typename T> void set(int64_t row, const T *x) const {
        const int64_t tile = row / kTileRows, lane = row % kTileRows, left = m_ - tile * kTileRows;
        const int64_t rows = left < kTileRows ? left : kTileRows;
        int32_t *to = groups(tile) + lane;
        for (int64_t run = 0; run < runs_; ++run) {
            const int64_t first = run * kRun, there = k_ - first < kRun ? k_ - first : kRun;
            int8_t q[kRun] = {};
            scales(tile)[run * rows + lane] = quantize_row(x + first, there, q);
            for (int64_t column = 0; column < kRun && first + column < blocks_ * kBlock; column += kGroup) {
                set_group(q + column, rows, to);
                to += kGroupWords<Weights> * rows;
            }
        }
    }

private:
    static void set_group(const int8_t *q, int64_t rows, int32_t *to) {
        if constexpr (kAddsPairs<Weights>) {
            for (int pair = 0; pair < kGroupPairs; ++pair, q += 8, to += 3 * rows) {
                std::memcpy(to, q, 4);
                std::memcpy(to + rows, q + 4, 4);
                const int low = -Weights::kOffset * (q[0] + q[1] + q[4] + q[5]);
                const int high = -Weights::kOffset * (q[2] + q[3] + q[6] + q[7]);
                to[2 * rows] = (low & 0xffff) | high * 0x10000;
            }
        } else {
            int32_t sum = 0;
            for (int64_t i = 0; i < kGroup; ++i) {
                sum += q[i];
            }
            *to = -Weights::kOffset * sum;
            for (int word = 1; word < kGroupWords<Weights>; ++word) {
                std::memcpy(to + word * rows, q + 4 * (word - 1), 4);
            }
        }
    }

    int64_t words() const { return blocks_ * kBlockGroups * kGroupWords<Weights>; } // per row

    int64_t m_, k_, blocks_, runs_;
    int32_t *memory_ = nullptr;
};

// ---- the weight ----

// The scales of a group for a vector of rows, as GroupSum wants them.
inline VecI load_scales(const uint8_t *p) {
#if defined(INFINI_SCALED_PAIRS)
    alignas(32) static constexpr int8_t kUpper[32] = {-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,
                                                      -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7};
    long long bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const __m256i upper =
        _mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), _mm256_load_si256(reinterpret_cast<const __m256i *>(kUpper)));
    return (VecI)_mm256_srai_epi16(upper, 8);
#elif defined(__AVX512F__)
    return (VecI)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__AVX2__)
    return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
#else
    VecI scales;
    for (int i = 0; i < kLanes; ++i) {
        scales[i] = static_cast<int8_t>(p[i]);
    }
    return scales;
#endif
}

// ---- products ----

// Adds the products of a group of columns and rows of x, times the group's scales. of_x: the group's words.
template <typename Weights, int kM> class GroupSum {
public:
#if defined(INFINI_SCALED_PAIRS)
    INFINI_ALWAYS_INLINE GroupSum(const int32_t *of_x, VecI scales, VecI *sums)
        : of_x_(of_x), scales_(scales), sums_(sums) {}
    INFINI_ALWAYS_INLINE void add(const VecU (&columns)[2], int pair) {
        if constexpr (kAddsPairs<Weights>) {
            const int32_t *const of_x = of_x_ + 3 * pair * kM;
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                const auto word_of_x = [&](int word) {
                    __m256i splat = _mm256_set1_epi32(of_x[word * kM + m]);
                    keep_in_register(splat); // GCC would keep it in memory for the panel's other vector
                    return splat;
                };
                const __m256i first = _mm256_maddubs_epi16((__m256i)columns[0], word_of_x(0));
                const __m256i second = _mm256_maddubs_epi16((__m256i)columns[1], word_of_x(1));
                const __m256i all = _mm256_add_epi16(first, second); // may wrap around, which the next addition undoes
                const __m256i sum = _mm256_add_epi16(all, word_of_x(2));
                sums_[m] += (VecI)_mm256_madd_epi16(sum, (__m256i)scales_);
                keep_in_register(sums_[m]); // GCC would add all products at the end, and spill them until then
            }
        } else {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    VecI x = VecI{} + of_x_[(1 + 2 * pair + part) * kM + m];
                    keep_in_register(x);
                    sums_[m] = scaled_dot(sums_[m], columns[part], x, scales_);
                    keep_in_register(sums_[m]);
                }
            }
        }
    }
    INFINI_ALWAYS_INLINE void finish() {}

private:
#else
    INFINI_ALWAYS_INLINE GroupSum(const int32_t *of_x, VecI scales, VecI *sums)
        : of_x_(of_x), scales_(scales), sums_(sums) {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            group_[m] = VecI{} + of_x[m];
        }
    }
    INFINI_ALWAYS_INLINE void add(const VecU (&columns)[2], int pair) {
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                const VecI x = VecI{} + of_x_[(1 + 2 * pair + part) * kM + m];
                group_[m] = Weights::add_products(group_[m], columns[part], x);
            }
        }
    }
    INFINI_ALWAYS_INLINE void finish() {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            sums_[m] += group_[m] * scales_;
        }
    }

private:
    VecI group_[kM];
#endif
    const int32_t *of_x_;
    VecI scales_, *sums_;
};

// For a few rows of x the weight is read as weight_reading() says: in kStreams distant places, one block of each in turn
// (one row of x, 4096 -> 14336, on a Sapphire Rapids core that reads 15.5 GB/s: 14.6 GB/s, in one place 9.5), or in one.
constexpr int kStreams = 4;

// How far ahead blocks of block_bytes are prefetched in one place; 0: not at all. Where the bandwidth is the limit the
// hardware prefetcher alone is best, and others delay it; where products are, it is not ahead enough. GB/s on a Zen 4
// core that sums floats at 33, 5632 -> 2048, none, 2048 and 10240 bytes ahead: table4 one row 28.8, 15.3, 21.0, two
// rows 23.2, 14.1, 26.6, four 13.8, 13.1, 19.9; group8 one row 29.4, 28.4, 18.4, two 26.1, 19.8, 19.9, four 21.5, 16.4,
// 19.9, eight 12.9, 13.4, 19.3 (by hand; weights in large pages, several that are together larger than the caches).
// A Zen 5 core that sums at 42, 2048 -> 5632, in four places and in one 0, 2048, 4096 and 10240 bytes ahead: table4 one
// row 22.0, 38.1, 37.1, 40.9, 49.0, four 15.2, 30.3, 28.9, 31.9, 35.4; group8 one row 25.5, 42.3, 39.5, 40.9, 38.1, two
// 24.1, 37.8, 34.4, 36.9, 35.3, three 20.7, 31.7, 32.9, 36.7, 38.0, eight 19.0, 16.8, 22.5, 26.4, 32.8.
constexpr int64_t kFarAhead = 10240;
constexpr bool prefetches(int64_t block_bytes, int rows, bool zen5) {
    return block_bytes > 1024 ? rows > (zen5 ? 2 : 4) : zen5 || rows > 1;
}

// Whether blocks of several places are prefetched. Without AVX-512, one row of x by bytes is faster by the hardware's
// prefetches alone: 1.24 times on a Zen 3 core, 2048 -> 5632; others are as fast either way (by hand, in turns).
template <typename Weights, int kM>
constexpr bool kPrefetchesBlocks = kManyRegisters || kM > 1 || Weights::kBlockBytes <= 1024;

// The sums of kM rows of x with one panel per stream; the panels lie `apart` bytes apart. kAhead: of one stream alone.
template <typename Weights, int kS, int kM, int64_t kAhead>
__attribute__((noinline)) void multiply_few(const QuantizedRows<Weights> &x, const uint8_t *panel, int64_t apart,
                                            VecF (&totals)[kS][kM][kVectors]) {
    constexpr int kPairLines = static_cast<int>((Weights::kBlockBytes - kScaleBytes) / kLineBytes / kPairs);
    const int32_t *groups = x.groups(0);
    VecI sums[kS][kM][kVectors] = {};
    std::memset(totals, 0, sizeof totals);
    const int64_t blocks = x.blocks();
    for (int64_t block = 0; block < blocks; ++block, panel += Weights::kBlockBytes) {
        for (int s = 0; s < kS; ++s) {
            const uint8_t *const data = panel + s * apart, *const lines = data + kScaleBytes;
            if constexpr (kS == 1 && kAhead > 0) {
                prefetch_weight(data + kAhead, true);
            } else if constexpr (kS > 1 && kPrefetchesBlocks<Weights, kM>) {
#pragma GCC unroll 20
                for (int64_t i = 0; i < Weights::kBlockBytes; i += 64) {
                    __builtin_prefetch(data + kAheadBytes + i);
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                VecI of_block[kM];
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    of_block[m] = sums[s][m][v];
                }
#pragma GCC unroll 4
                for (int g = 0; g < kBlockGroups; ++g) {
                    GroupSum<Weights, kM> group(groups + g * kGroupWords<Weights> * kM,
                                                load_scales(data + g * kPanel + v * kLanes), of_block);
#pragma GCC unroll 2
                    for (int pair = 0; pair < kGroupPairs; ++pair) {
                        if (kS == 1 && kAhead > 0 &&
                            v == 0) { // not all at once: there are few buffers for lines in flight
#pragma GCC unroll 2
                            for (int line = 0; line < kPairLines; ++line) {
                                prefetch_weight(
                                    lines + ((g * kGroupPairs + pair) * kPairLines + line) * kLineBytes + kAhead, true);
                            }
                        }
                        VecU columns[2];
                        Weights::unpack(lines, g * kGroupPairs + pair, v, columns);
                        group.add(columns, pair);
                    }
                    group.finish();
                }
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    sums[s][m][v] = of_block[m];
                }
            }
        }
        groups += kBlockGroups * kGroupWords<Weights> * kM;
        if (block % Weights::kRunBlocks == Weights::kRunBlocks - 1 || block == blocks - 1) {
            for (int m = 0; m < kM; ++m) {
                const VecF scale = splat(x.scales(0)[block / Weights::kRunBlocks * kM + m]);
                for (int s = 0; s < kS; ++s) {
                    for (int v = 0; v < kVectors; ++v) {
                        totals[s][m][v] += scale * __builtin_convertvector(sums[s][m][v], VecF);
                        sums[s][m][v] = VecI{};
                    }
                }
            }
        }
    }
}

// A run of a panel: the unpacked weights, [4 columns, vector], and the scales, [group, vector].
template <typename Weights> struct UnpackedRun {
    VecU columns[Weights::kRunBlocks * kPairs * 2][kVectors];
    VecI scales[Weights::kRunBlocks * kBlockGroups][kVectors];

    void fill(const uint8_t *panel, int64_t blocks) {
        for (int64_t block = 0; block < blocks; ++block, panel += Weights::kBlockBytes) {
            // Prefetches to L2, because many rows are multiplied before these lines are read.
            for (int64_t i = 0; i < Weights::kBlockBytes; i += 64) {
                __builtin_prefetch(panel + 4 * kAheadBytes + i, 0, 2);
            }
            for (int v = 0; v < kVectors; ++v) {
                for (int pair = 0; pair < kPairs; ++pair) {
                    VecU both[2];
                    Weights::unpack(panel + kScaleBytes, pair, v, both);
                    columns[(block * kPairs + pair) * 2][v] = both[0];
                    columns[(block * kPairs + pair) * 2 + 1][v] = both[1];
                }
                for (int g = 0; g < kBlockGroups; ++g) {
                    scales[block * kBlockGroups + g][v] = load_scales(panel + g * kPanel + v * kLanes);
                }
            }
        }
    }
};

// totals[m][v] += a run's part of the sums of kM rows of x; the run has `blocks` blocks. x: the run's groups and
// scales.
template <typename Weights, int kM>
__attribute__((noinline)) void add_run(const int32_t *groups, const float *x_scales, int64_t blocks,
                                       const UnpackedRun<Weights> &weights, VecF *totals) {
    for (int v = 0; v < kVectors; ++v) {
        const int32_t *of_x = groups;
        VecI sums[kM] = {};
        for (int64_t g = 0; g < blocks * kBlockGroups; ++g, of_x += kGroupWords<Weights> * kM) {
            GroupSum<Weights, kM> group(of_x, weights.scales[g][v], sums);
#pragma GCC unroll 2
            for (int pair = 0; pair < kGroupPairs; ++pair) {
                const VecU(*const of_pair)[kVectors] = weights.columns + (g * kGroupPairs + pair) * 2;
                const VecU columns[2] = {of_pair[0][v], of_pair[1][v]};
                group.add(columns, pair);
            }
            group.finish();
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            totals[m * kVectors + v] += splat(x_scales[m]) * __builtin_convertvector(sums[m], VecF);
        }
    }
}

// Calls body(std::integral_constant) with m, 1 <= m <= kMax.
template <int64_t kMax, typename Body> void with_rows(int64_t m, const Body &body) {
    if constexpr (kMax > 1) {
        if (m < kMax) {
            return with_rows<kMax - 1>(m, body);
        }
    }
    body(std::integral_constant<int, static_cast<int>(kMax)>{});
}

// Takes kVectors vectors of results of a row and a panel. What it writes them as is no type here, so that products are
// compiled once for all of them.
struct Output {
    const void *writer;
    void (*write)(const void *writer, int64_t row, int64_t panel, const VecF *totals);

    void operator()(int64_t row, int64_t panel, const VecF *totals) const { write(writer, row, panel, totals); }
};

// Passes the results of kS streams of panels to output. Returns the end of the panels that divide evenly among them.
template <typename Weights, int kS, int kM, int64_t kAhead>
int64_t multiply_streams(const Args &a, const QuantizedRows<Weights> &x, int64_t begin, int64_t end,
                         const Output &output) {
    const int64_t panel_bytes = x.blocks() * Weights::kBlockBytes, length = (end - begin) / kS;
    for (int64_t panel = begin; panel < begin + length; ++panel) {
        VecF totals[kS][kM][kVectors];
        multiply_few<Weights, kS, kM, kAhead>(x, a.weight.as<const uint8_t>() + panel * panel_bytes,
                                              length * panel_bytes, totals);
        for (int s = 0; s < kS; ++s) {
            for (int row = 0; row < kM; ++row) {
                output(row, panel + s * length, totals[s][row]);
            }
        }
    }
    return begin + kS * length;
}

template <typename Weights>
void multiply_panels(const Args &a, const QuantizedRows<Weights> &x, int64_t m, int64_t begin, int64_t end,
                     char *scratch, const Output &output) {
    if (m <= kFewRows<Weights>) {
        with_rows<kFewRows<Weights>>(m, [&](auto rows) {
            constexpr bool kOnZen4 = prefetches(Weights::kBlockBytes, rows, false);
            constexpr bool kOnZen5 = prefetches(Weights::kBlockBytes, rows, true);
            if (weight_reading(WeightReading::kOnePlace) == WeightReading::kSeveralPlaces) {
                begin = multiply_streams<Weights, kStreams, rows, 0>(a, x, begin, end, output);
            }
            if (kOnZen4 == kOnZen5 || !is_zen5()) {
                multiply_streams<Weights, 1, rows, kOnZen4 ? kFarAhead : 0>(a, x, begin, end, output);
            } else {
                multiply_streams<Weights, 1, rows, kOnZen5 ? kFarAhead : 0>(a, x, begin, end, output);
            }
        });
        return;
    }
    const auto *const weight = a.weight.as<const uint8_t>();
    const int64_t blocks = x.blocks();
    for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t *const data = weight + panel * blocks * Weights::kBlockBytes;
        auto *const totals = reinterpret_cast<VecF *>(scratch);
        std::memset(scratch, 0, static_cast<size_t>(m) * kVectors * sizeof(VecF));
        for (int64_t block = 0; block < blocks; block += Weights::kRunBlocks) {
            const int64_t count = blocks - block < Weights::kRunBlocks ? blocks - block : Weights::kRunBlocks;
            UnpackedRun<Weights> run;
            run.fill(data + block * Weights::kBlockBytes, count);
            for (int64_t row = 0; row < m; row += kTileRows) {
                with_rows<kTileRows>(m - row < kTileRows ? m - row : kTileRows, [&](auto rows) {
                    const int64_t tile = row / kTileRows;
                    add_run<Weights, rows>(x.groups(tile) + block * kBlockGroups * kGroupWords<Weights> * rows,
                                           x.scales(tile) + block / Weights::kRunBlocks * rows, count, run,
                                           totals + row * kVectors);
                });
            }
        }
        for (int64_t row = 0; row < m; ++row) {
            output(row, panel, totals + row * kVectors);
        }
    }
}

template <typename Weights> void multiply_by_dots(const Args &args) {
    weight_reading(); // throws for a wrong setting, which no parallel region may
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_passes<QuantizedRows<Weights>, Weights, kMaxRows, decltype(type)>(
            args, [](const auto &, int64_t m) { return m > kFewRows<Weights> ? m * kPanel * 4 : 0; },
            [&](const auto &x, int64_t m, int64_t begin, int64_t end, char *scratch, const auto &writer) {
                using Writer = std::remove_reference_t<decltype(writer)>;
                const Output output{&writer, [](const void *to, int64_t row, int64_t panel, const VecF *totals) {
                                        (*static_cast<Writer *>(to))(row, panel, totals);
                                    }};
                multiply_panels(args, x, m, begin, end, scratch, output);
            });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL
