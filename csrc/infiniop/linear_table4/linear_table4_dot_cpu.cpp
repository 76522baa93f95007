// The CPU kernel of linear_table4: x becomes int8 with a scale for each run of 128 columns, indices become bytes by one
// shuffle, and four products of bytes are added to a lane, which is a row of the weight.
// A table's integers are multiplied as unsigned bytes, 64 larger; the sums start at -64 times the group's sum of x. Each
// sum of a group times its scale, and these over a run, are exact in int32; runs are added in float, in order: a row
// has the same bits at every level, in any call.
// Limit: memory bandwidth of the weight's 4.5 bits for up to 4 rows, the multiply-adds of bytes for many.
#include "int8_gemm/int8_dots.h"
#include "linear_table4.h"
#include "table4_passes.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kMaxRows = 256; // of x that are quantized at once: with k up to 4096 about 1 MB
constexpr int64_t kFewRows = kManyRegisters ? 4 : 2;
constexpr int64_t kTileRows = kManyRegisters ? 8 : 4;
constexpr int kLines = kBlock / 8, kGroupLines = kLines / kBlockGroups;
constexpr int64_t kAheadBytes = 2048;

// ---- x ----

// m rows of x: int8 and 0 beyond k; for each group -64 times its sum; for each run its scale.
class QuantizedRows {
public:
    QuantizedRows(int64_t m, int64_t k)
        : m_(m), k_(k), blocks_((k + kBlock - 1) / kBlock), runs_((k + kRun - 1) / kRun) {}

    int64_t blocks() const { return blocks_; }
    int64_t bytes() const { return m_ * row_bytes(); }
    void set_memory(void *memory) { memory_ = static_cast<char *>(memory); }
    const int8_t *values(int64_t row) const { return reinterpret_cast<const int8_t *>(memory_ + row * row_bytes()); }
    const int32_t *starts(int64_t row) const {
        return reinterpret_cast<const int32_t *>(values(row) + blocks_ * kBlock);
    }
    const float *scales(int64_t row) const {
        return reinterpret_cast<const float *>(starts(row) + blocks_ * kBlockGroups);
    }

    template <typename T> void set(int64_t row, const T *x) const {
        auto *const q = const_cast<int8_t *>(values(row));
        auto *const starts_of = const_cast<int32_t *>(starts(row));
        auto *const scales_of = const_cast<float *>(scales(row));
        for (int64_t run = 0; run < runs_; ++run) {
            const int64_t first = run * kRun, left = k_ - first;
            scales_of[run] = quantize_row(x + first, left < kRun ? left : kRun, q + first);
        }
        std::memset(q + k_, 0, static_cast<size_t>(blocks_ * kBlock - k_));
        for (int64_t g = 0; g < blocks_ * kBlockGroups; ++g) {
            int32_t sum = 0;
            for (int64_t i = 0; i < kGroup; ++i) {
                sum += q[g * kGroup + i];
            }
            starts_of[g] = -64 * sum;
        }
    }

private:
    int64_t row_bytes() const { return (blocks_ * (kBlock + 4 * kBlockGroups) + 4 * runs_ + 63) / 64 * 64; }

    int64_t m_, k_, blocks_, runs_;
    char *memory_ = nullptr;
};

// ---- the weight ----

alignas(64) constexpr uint8_t kLevels[64] = {
    0,  12, 22,  32,  40, 47, 54, 60, 65,  70,  76, 82, 89, 97, 106, 121, 0,  12, 22,  32,  40, 47,
    54, 60, 65,  70,  76, 82, 89, 97, 106, 121, 0,  12, 22, 32, 40,  47,  54, 60, 65,  70,  76, 82,
    89, 97, 106, 121, 0,  12, 22, 32, 40,  47,  54, 60, 65, 70, 76,  82,  89, 97, 106, 121,
};

constexpr bool levels_are_of_the_table() {
    for (int i = 0; i < 64; ++i) {
        if (kLevels[i] != kTable[i % 16] + 64) {
            return false;
        }
    }
    return true;
}
static_assert(levels_are_of_the_table());

// Bytes below 16 become table[byte] + 64.
inline VecU look_up(VecU indices) {
#if defined(__AVX512F__)
    return (VecU)_mm512_shuffle_epi8(_mm512_load_si512(kLevels), (__m512i)indices);
#elif defined(__AVX2__)
    return (VecU)_mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i *>(kLevels)), (__m256i)indices);
#elif defined(__aarch64__)
    return (VecU)vqtbl1q_u8(vld1q_u8(kLevels), (uint8x16_t)indices);
#else
    uint8_t bytes[kVectorBytes];
    std::memcpy(bytes, &indices, sizeof bytes);
    for (uint8_t &byte : bytes) {
        byte = kLevels[byte];
    }
    return load_bytes(bytes);
#endif
}

// The weights of a vector of a line: of its first four columns, and of the others.
inline void unpack(const uint8_t *line, VecU (&columns)[2]) {
    const VecU indices = load_bytes(line);
    columns[0] = look_up(indices & 0x0f0f0f0fu);
    columns[1] = look_up(indices >> 4 & 0x0f0f0f0fu);
}

inline VecI load_scales(const uint8_t *p) {
#if defined(__AVX512F__)
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

// Up to kFewRows rows of x, the weight is read in kStreams distant places, a block of each in turns: one place gave 9.5
// GB/s where four give 14.6 (one row of x, 4096 -> 14336 on a Sapphire Rapids core that reads 15.5).
constexpr int kStreams = 4;

// The sums of kM rows of x with a panel of each stream, `apart` bytes apart.
template <int kS, int kM>
__attribute__((noinline)) void multiply_few(const QuantizedRows &x, const uint8_t *panel, int64_t apart,
                                            VecF (&totals)[kS][kM][kVectors]) {
    const int8_t *values[kM];
    const int32_t *starts[kM];
    for (int m = 0; m < kM; ++m) {
        values[m] = x.values(m);
        starts[m] = x.starts(m);
    }
    VecI sums[kS][kM][kVectors] = {};
    std::memset(totals, 0, sizeof totals);
    const int64_t blocks = x.blocks();
    for (int64_t block = 0; block < blocks; ++block, panel += kBlockBytes) {
        const int64_t column = block * kBlock, group = block * kBlockGroups;
        for (int s = 0; s < kS; ++s) {
            const uint8_t *const data = panel + s * apart, *const lines = data + kScaleBytes;
#pragma GCC unroll 16
            for (int64_t i = 0; i < kBlockBytes; i += 64) {
                __builtin_prefetch(data + kAheadBytes + i);
            }
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                VecI of_block[kM];
#pragma GCC unroll 4
                for (int m = 0; m < kM; ++m) {
                    of_block[m] = sums[s][m][v];
                }
#pragma GCC unroll 4
                for (int g = 0; g < kBlockGroups; ++g) {
                    VecI of_group[kM];
#pragma GCC unroll 4
                    for (int m = 0; m < kM; ++m) {
                        of_group[m] = VecI{} + starts[m][group + g];
                    }
#pragma GCC unroll 2
                    for (int l = g * kGroupLines; l < (g + 1) * kGroupLines; ++l) {
                        VecU columns[2];
                        unpack(lines + l * kLineBytes + v * kVectorBytes, columns);
#pragma GCC unroll 2
                        for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 4
                            for (int m = 0; m < kM; ++m) {
                                of_group[m] = dot_of_small(of_group[m], columns[part],
                                                           splat_word(values[m] + column + 8 * l + 4 * part));
                            }
                        }
                    }
                    const VecI scales = load_scales(data + g * kPanel + v * kLanes);
#pragma GCC unroll 4
                    for (int m = 0; m < kM; ++m) {
                        of_block[m] += of_group[m] * scales;
                    }
                }
#pragma GCC unroll 4
                for (int m = 0; m < kM; ++m) {
                    sums[s][m][v] = of_block[m];
                }
            }
        }
        if (block % kRunBlocks == kRunBlocks - 1 || block == blocks - 1) {
            for (int m = 0; m < kM; ++m) {
                const VecF scale = splat(x.scales(m)[block / kRunBlocks]);
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

// A run of a panel: the unpacked weights, [part of a line, vector], and the scales, [group, vector].
struct UnpackedRun {
    VecU columns[kRunBlocks * kLines * 2][kVectors];
    VecI scales[kRunBlocks * kBlockGroups][kVectors];

    void fill(const uint8_t *panel, int64_t blocks) {
        for (int64_t block = 0; block < blocks; ++block, panel += kBlockBytes) {
            for (int v = 0; v < kVectors; ++v) {
                for (int l = 0; l < kLines; ++l) {
                    VecU both[2];
                    unpack(panel + kScaleBytes + l * kLineBytes + v * kVectorBytes, both);
                    columns[(block * kLines + l) * 2][v] = both[0];
                    columns[(block * kLines + l) * 2 + 1][v] = both[1];
                }
                for (int g = 0; g < kBlockGroups; ++g) {
                    scales[block * kBlockGroups + g][v] = load_scales(panel + g * kPanel + v * kLanes);
                }
            }
        }
    }
};

// totals[m][v] += a run's part of the sums of kM rows of x; `blocks` of the run are there.
template <int kM>
__attribute__((noinline)) void add_run(const QuantizedRows &x, int64_t first_row, int64_t run, int64_t blocks,
                                       const UnpackedRun &weights, VecF *totals) {
    const int8_t *values[kM];
    const int32_t *starts[kM];
    for (int m = 0; m < kM; ++m) {
        values[m] = x.values(first_row + m) + run * kRun;
        starts[m] = x.starts(first_row + m) + run * kRun / kGroup;
    }
    constexpr int kParts = kGroup / 4;
    for (int v = 0; v < kVectors; ++v) {
        VecI sums[kM] = {};
        for (int64_t g = 0; g < blocks * kBlockGroups; ++g) {
            VecI of_group[kM];
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                of_group[m] = VecI{} + starts[m][g];
            }
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                const VecU columns = weights.columns[g * kParts + part][v];
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    of_group[m] = dot_of_small(of_group[m], columns, splat_word(values[m] + g * kGroup + 4 * part));
                }
            }
            const VecI scales = weights.scales[g][v];
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                sums[m] += of_group[m] * scales;
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            totals[m * kVectors + v] += splat(x.scales(first_row + m)[run]) * __builtin_convertvector(sums[m], VecF);
        }
    }
}

// body(std::integral_constant) of 1 <= m <= kMax.
template <int64_t kMax, typename Body> void with_rows(int64_t m, const Body &body) {
    if constexpr (kMax > 1) {
        if (m < kMax) {
            return with_rows<kMax - 1>(m, body);
        }
    }
    body(std::integral_constant<int, static_cast<int>(kMax)>{});
}

// output(row, panel, totals) takes kVectors vectors of results.
template <int kS, typename Output>
int64_t multiply_streams(const Args &a, const QuantizedRows &x, int64_t m, int64_t begin, int64_t end,
                         const Output &output) {
    const int64_t panel_bytes = x.blocks() * kBlockBytes, length = (end - begin) / kS;
    with_rows<kFewRows>(m, [&](auto rows) {
        for (int64_t panel = begin; panel < begin + length; ++panel) {
            VecF totals[kS][rows][kVectors];
            multiply_few<kS, rows>(x, a.weight.as<const uint8_t>() + panel * panel_bytes, length * panel_bytes, totals);
            for (int s = 0; s < kS; ++s) {
                for (int row = 0; row < rows; ++row) {
                    output(row, panel + s * length, totals[s][row]);
                }
            }
        }
    });
    return begin + kS * length;
}

template <typename Output>
void multiply_panels(const Args &a, const QuantizedRows &x, int64_t m, int64_t begin, int64_t end, char *scratch,
                     const Output &output) {
    const auto *const weight = a.weight.as<const uint8_t>();
    const int64_t blocks = x.blocks();
    if (m <= kFewRows) {
        begin = multiply_streams<kStreams>(a, x, m, begin, end, output);
        multiply_streams<1>(a, x, m, begin, end, output);
        return;
    }
    for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t *const data = weight + panel * blocks * kBlockBytes;
        auto *const totals = reinterpret_cast<VecF *>(scratch);
        std::memset(scratch, 0, static_cast<size_t>(m) * kVectors * sizeof(VecF));
        for (int64_t block = 0; block < blocks; block += kRunBlocks) {
            const int64_t count = blocks - block < kRunBlocks ? blocks - block : kRunBlocks;
            UnpackedRun run;
            run.fill(data + block * kBlockBytes, count);
            for (int64_t row = 0; row < m; row += kTileRows) {
                with_rows<kTileRows>(m - row < kTileRows ? m - row : kTileRows, [&](auto rows) {
                    add_run<rows>(x, row, block / kRunBlocks, count, run, totals + row * kVectors);
                });
            }
        }
        for (int64_t row = 0; row < m; ++row) {
            output(row, panel, totals + row * kVectors);
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::dot_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_passes<QuantizedRows, kMaxRows, decltype(type)>(
            args, [](const QuantizedRows &, int64_t m) { return m > kFewRows ? m * kPanel * 4 : 0; },
            [&](const QuantizedRows &x, int64_t m, int64_t begin, int64_t end, char *scratch, const auto &output) {
                multiply_panels(args, x, m, begin, end, scratch, output);
            });
    });
}
