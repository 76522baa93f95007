// A few rows of int8 x times rows of integer weights: the weights are read in place, along k, once for all rows of x.
// Integer sums are exact in any order; the sums of groups are added as in Int8Product, from the first on.
// Limit: memory bandwidth of the weights' bytes.
#pragma once

#include "int8_dots.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

// The weight rows are read in kFarStreams distant parts, a few cache lines of each in turn. Runs of 512 bytes from one
// part gave 17 GB/s instead of 27 GB/s, whole rows 22 GB/s (int4, one row of x, 2048 -> 2048 on a Zen 5 core).
constexpr int kFarStreams = 4;

#if defined(__AVX2__)
constexpr auto kAllLanes = std::make_integer_sequence<int, kLanes>{};

// Adds to lanes at(0), at(1), ... of the concatenation of a and b the lanes kApart after them. For each order used
// below, GCC emits one permutation per operand.
template <int kApart, typename V, typename At, int... kLane>
INFINI_ALWAYS_INLINE VecI add_lanes(V a, V b, At at, std::integer_sequence<int, kLane...>) {
    return (VecI)__builtin_shufflevector(a, b, at(kLane)...) +
           (VecI)__builtin_shufflevector(a, b, (at(kLane) + kApart)...);
}

// Element l of 128-bit part q is the sum of part q of lines[l].
INFINI_ALWAYS_INLINE VecI sum_parts_of(const VecI (&lines)[4]) {
    typedef int64_t Pairs __attribute__((vector_size(sizeof(VecI))));
    const auto words = [](int i) { return i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes; };
    const auto pairs = [](int i) { return i / 2 * 2 + i % 2 * kLanes / 2; };
    const VecI low = add_lanes<2>(lines[0], lines[1], words, kAllLanes);
    const VecI high = add_lanes<2>(lines[2], lines[3], words, kAllLanes);
    return add_lanes<1>((Pairs)low, (Pairs)high, pairs, std::make_integer_sequence<int, kLanes / 2>{});
}

// Adds parts 0 and 1, 2 and 3, ... of a, then those of b.
INFINI_ALWAYS_INLINE VecI add_parts(VecI a, VecI b) {
    return add_lanes<4>(a, b, [](int i) { return i / 4 * 8 + i % 4; }, kAllLanes);
}

// Reorders the kParts sums of each of four lines: those of the first line, then those of the next, repeated to fill the
// vector.
template <int kParts, int... kLane>
INFINI_ALWAYS_INLINE VecI line_by_line(VecI sums, std::integer_sequence<int, kLane...>) {
    constexpr int kAll = 4 * kParts;
    return __builtin_shufflevector(sums, sums, (kLane / kAll * kAll + kLane % kParts * 4 + kLane % kAll / kParts)...);
}

// The sums of kLanes groups of kGroup elements, in order, from sum_parts_of four lines each. A part of a line has 32
// elements, two per byte.
template <int kGroup> INFINI_ALWAYS_INLINE VecI group_sums(const VecI *sums) {
    constexpr int kParts = kLanes / 4;
    if constexpr (kGroup == 32) {
        return line_by_line<kParts>(sums[0], kAllLanes);
    } else if constexpr (kGroup == 64) {
        return line_by_line<kParts / 2>(add_parts(sums[0], sums[1]), kAllLanes);
    } else {
        const VecI low = add_parts(sums[0], sums[1]), high = add_parts(sums[2], sums[3]);
#if defined(__AVX512F__)
        return add_parts(low, high);
#else // a line has two parts, a group two lines
        return (VecI)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)low, (__m256i)high), 0xd8);
#endif
    }
}
#endif

template <typename F> class FewRows {
public:
    // The most rows of x for which this is faster than panels in registers (Int8Product). Groups are summed from AVX2
    // on.
    static constexpr int64_t kMaxRows = !F::kGrouped ? 1 : kLanes >= 8 ? 2 : 0;

    // The prefetch distance, larger for grouped weights, whose multiplication takes longer.
    static constexpr int64_t kAheadBytes = F::kGrouped ? 2048 : 1024;

    // For m rows of k elements; a row of the weights has `groups` groups.
    FewRows(int64_t m, int64_t k, int64_t groups) : m_(m), groups_(groups), group_(groups > 0 ? k / groups : 0) {
        row_bytes_ = (k + F::kPieces - 1) / F::kPieces;
        turns_ = (row_bytes_ + kTurn * kVectorBytes - 1) / (kTurn * kVectorBytes);
        padded_groups_ = (groups + kLanes - 1) / kLanes * kLanes;
    }

    // Elements of a quantized row, padded with zeros beyond k.
    int64_t padded() const { return turns_ * kTurn * kVectorBytes * F::kPieces; }
    // The memory for x, and for each thread, in bytes.
    int64_t x_bytes() const { return m_ * x_row_bytes(); }
    int64_t scratch_bytes() const { return kFarStreams * kLanes * m_ * result_bytes(); }

    // Packs a row of x in the order of the weights' lines: for nibbles, all even elements first. Then, for each group,
    // the initial value of its products' sum, and the sum of its elements.
    void set_row(const int8_t *q, uint8_t *x, int64_t row) const {
        x += row * x_row_bytes();
        if constexpr (F::kPieces == 1) {
            std::memcpy(x, q, static_cast<size_t>(padded()));
        } else {
            for (int64_t line = 0; line < padded(); line += 2 * kVectorBytes) {
                for (int64_t i = 0; i < kVectorBytes; ++i) {
                    x[line + i] = static_cast<uint8_t>(q[line + 2 * i]);
                    x[line + kVectorBytes + i] = static_cast<uint8_t>(q[line + 2 * i + 1]);
                }
            }
        }
        auto *const starts = reinterpret_cast<int32_t *>(x + padded());
        auto *const sums = reinterpret_cast<float *>(starts + padded_groups_);
        for (int64_t g = 0; g < padded_groups_; ++g) {
            int32_t sum = 0;
            for (int64_t i = g * group_; g < groups_ && i < (g + 1) * group_; ++i) {
                sum += q[i];
            }
            starts[g] = -F::kOffset * sum;
            sums[g] = static_cast<float>(sum);
        }
    }

    // The same interface as Int8Product::multiply.
    template <typename Scales, typename Epilogue>
    void multiply(const uint8_t *x, const WeightRows &weights, const Scales &scales, char *scratch,
                  const Epilogue &output) const {
        const Call<Scales, Epilogue> call{x, scales, reinterpret_cast<uint8_t *>(scratch), output};
        const int64_t most = weights.count / kFarStreams * kFarStreams;
        const WeightRows left{weights.data + most * weights.stride, weights.stride, weights.first + most,
                              weights.count - most};
        multiply_groups<kFarStreams>({weights.data, weights.stride, weights.first, most}, call);
        multiply_groups<1>(left, call);
    }

private:
    template <typename Scales, typename Epilogue> struct Call {
        const uint8_t *x;
        const Scales &scales;
        uint8_t *results; // one vector per weight row, row of x and chunk: [weight row, stream, row of x, chunk]
        const Epilogue &output;
    };

    static constexpr int kTurn = F::kGrouped ? 4 : 2; // lines with independent sums

    int64_t x_row_bytes() const { return padded() + 2 * 4 * padded_groups_; }
    // The results of a weight row and a row of x, in bytes: the scaled sums of the groups, or the lanes of one sum.
    int64_t result_bytes() const { return F::kGrouped ? padded_groups_ * 4 : kVectorBytes; }

    template <int kStreams, typename C> void multiply_groups(const WeightRows &weights, const C &call) const {
        if constexpr (!F::kGrouped) {
            multiply_streams<kStreams, 64>(weights, call); // no groups: chunks of 8 lines
        } else if (group_ == 32) {
            multiply_streams<kStreams, 32>(weights, call);
        } else if (group_ == 128) {
            multiply_streams<kStreams, 128>(weights, call);
        } else {
            multiply_streams<kStreams, 64>(weights, call);
        }
    }

    // Lines of a weight row that are multiplied together: those of kLanes groups.
    static constexpr int chunk_lines(int group) { return group / 8; }
    template <int kGroup> int64_t whole_chunks() const { return row_bytes_ / (chunk_lines(kGroup) * kVectorBytes); }

    template <int kStreams, int kGroup, typename C>
    void multiply_streams(const WeightRows &weights, const C &call) const {
        const int64_t length = weights.count / kStreams, apart = length * weights.stride;
        const int64_t results_apart = m_ * result_bytes();
        for (int64_t first = 0; first < length; first += kLanes) {
            const int64_t rows = length - first < kLanes ? length - first : kLanes;
            uint8_t *results = call.results;
            for (int64_t i = first; i < first + rows; ++i, results += kStreams * results_apart) {
                const Rows rows_of_parts{weights.data + i * weights.stride, apart, weights.first + i, length};
                for (int64_t m = 0; m < m_; ++m) {
                    multiply_rows<kStreams, kGroup>(rows_of_parts, m, call, results + m * result_bytes());
                }
            }
            for (int64_t stream = 0; stream < kStreams; ++stream) {
                for (int64_t m = 0; m < m_; ++m) {
                    finish(m, weights.first + stream * length + first, rows, kStreams * results_apart,
                           call.results + stream * results_apart + m * result_bytes(), call);
                }
            }
        }
    }

    // One weight row per stream.
    struct Rows {
        const uint8_t *data;
        int64_t apart; // distance in bytes
        int64_t row, rows_apart;
    };

    // Multiplies these weight rows by row m of x.
    template <int kStreams, int kGroup, typename C>
    __attribute__((noinline)) void multiply_rows(const Rows &rows, int64_t m, const C &call, uint8_t *results) const {
        const int64_t whole = whole_chunks<kGroup>();
        const uint8_t *const x = call.x + m * x_row_bytes();
        VecI totals[kStreams][kTurn] = {};
        for (int64_t c = 0; c < whole; ++c) {
            add_chunk<kGroup, true>(rows, c, m == 0, x, call, totals, results);
        }
        if (row_bytes_ > whole * chunk_lines(kGroup) * kVectorBytes) {
            add_chunk<kGroup, false>(rows, whole, m == 0, x, call, totals, results);
        }
        if constexpr (!F::kGrouped) {
#pragma GCC unroll 4
            for (int s = 0; s < kStreams; ++s) {
                const VecI total = totals[s][0] + totals[s][1];
                std::memcpy(results + s * m_ * kVectorBytes, &total, sizeof total);
            }
        }
    }

    // Computes chunk c for each weight row and a row of x. The sums are added to totals or, for groups, scaled and
    // stored as the chunk's results. kWhole: the rows do not end within it. Otherwise every turn and line is checked:
    // copies for each number of turns took half of the time to compile and were slower, but for int4 of two rows in
    // groups of 128 (Zen 4).
    template <int kGroup, bool kWhole, int kStreams, typename C>
    INFINI_ALWAYS_INLINE void add_chunk(const Rows &rows, int64_t c, bool prefetches, const uint8_t *x,
                                        [[maybe_unused]] const C &call, VecI (&totals)[kStreams][kTurn],
                                        [[maybe_unused]] uint8_t *results) const {
        constexpr int kChunk = chunk_lines(kGroup);
        const int64_t at = c * kChunk * kVectorBytes;
        const uint8_t *const factors = x + at * F::kPieces;
        [[maybe_unused]] VecI parts[kStreams][kChunk / kTurn] = {};
        const auto add_turn = [&](int turn) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int s = 0; s < kStreams; ++s) {
                const uint8_t *const data = rows.data + s * rows.apart + at;
                VecI(&sums)[kTurn] = totals[s]; // reset per group
#pragma GCC unroll 4
                for (int i = 0; i < kTurn; ++i) {
                    const int l = turn + i;
                    if constexpr (F::kGrouped) {
                        sums[i] = VecI{};
                    }
                    const uint8_t *const line = data + l * kVectorBytes;
                    const int64_t left = row_bytes_ - at - l * kVectorBytes;
                    if (!kWhole && left <= 0) {
                        continue;
                    }
                    if (prefetches) {
                        prefetch_weight(line + kAheadBytes, far_);
                    }
                    VecU bytes[F::kPieces];
                    F::split(kWhole || left >= kVectorBytes ? load_bytes(line) : load_bytes(line, left), bytes);
#pragma GCC unroll 2
                    for (int piece = 0; piece < F::kPieces; ++piece) {
                        const uint8_t *const factor = factors + (l * F::kPieces + piece) * kVectorBytes;
                        sums[i] = F::add_products(sums[i], bytes[piece], (VecI)load_bytes(factor));
                    }
                }
                if constexpr (F::kGrouped) {
#if defined(__AVX2__)
                    parts[s][turn / kTurn] = sum_parts_of(sums);
#endif
                }
            }
        };
#pragma GCC unroll 8
        for (int turn = 0; turn < kChunk; turn += kTurn) {
            if (kWhole || row_bytes_ > at + turn * kVectorBytes) {
                add_turn(turn);
            }
        }
#if defined(__AVX2__)
        if constexpr (F::kGrouped) {
            const int64_t g = c * kLanes;
            const VecI starts = (VecI)load_bytes(x + padded() + 4 * g);
            const VecF x_sums = (VecF)load_bytes(x + padded() + 4 * (padded_groups_ + g));
            const auto add = [&](auto lanes) __attribute__((always_inline)) {
                VecF scales[kStreams], zeros[kStreams];
                call.scales.scales(rows.row, rows.rows_apart, g, lanes, scales);
                const bool has_zeros = call.scales.has_zeros();
                if (has_zeros) {
                    call.scales.zeros(rows.row, rows.rows_apart, g, lanes, zeros);
                }
#pragma GCC unroll 4
                for (int s = 0; s < kStreams; ++s) {
                    const VecF sum = __builtin_convertvector(group_sums<kGroup>(parts[s]) + starts, VecF);
                    const VecF scaled = scales[s] * sum, all = has_zeros ? scaled + zeros[s] * x_sums : scaled;
                    std::memcpy(results + s * m_ * result_bytes() + 4 * g, &all, sizeof all);
                }
            };
            if constexpr (kWhole) {
                add(Full{});
            } else {
                add(static_cast<int>(groups_ - g));
            }
        }
#endif
    }

    // Reduces the lanes of the sums of up to kLanes weight rows and a row of x to results.
    template <typename C>
    void finish(int64_t m, int64_t weight_row, int64_t count, int64_t apart, const uint8_t *results,
                const C &call) const {
        VecU columns[kLanes];
        const auto load_columns = [&](int64_t at) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                columns[i] = i < count ? load_bytes(results + i * apart + at) : VecU{};
            }
            transpose(columns);
        };
        VecF value{};
        if constexpr (F::kGrouped) {
            for (int64_t g = 0; g < groups_; g += kLanes) {
                load_columns(4 * g);
                for (int64_t i = 0; i < kLanes && g + i < groups_; ++i) {
                    value += (VecF)columns[i];
                }
            }
        } else {
            load_columns(0);
            int32_t start;
            std::memcpy(&start, call.x + m * x_row_bytes() + padded(), 4);
            VecU total = VecU{} + static_cast<uint32_t>(start);
            for (const VecU &column : columns) {
                total += column;
            }
            value = __builtin_convertvector((VecI)total, VecF);
        }
        if (count == kLanes) {
            call.output(m, weight_row, value, Full{});
        } else {
            call.output(m, weight_row, value, static_cast<int>(count));
        }
    }

    int64_t m_, groups_, group_, row_bytes_, turns_, padded_groups_;
    bool far_ = weight_reading() == WeightReading::kOnePlace;
};

} // namespace
} // namespace infini::INFINI_LEVEL
