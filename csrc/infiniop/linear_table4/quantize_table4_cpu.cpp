// The CPU kernel of quantize_table4: a lane has a row, so that sums run over a group's columns in their order and every
// level gives the same bits. For each group the scale is fitted by least squares to the indices that each of kTries
// lays down, and the one with the least error is kept; then scales and weights are rounded.
// Limit: arithmetic, kTries times 16 comparisons a weight.
#include "linear_table4.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using namespace linear_table4;

// Where a group's largest element (by magnitude) is laid in the table, which ends at -64 and 57.
constexpr float kTries[] = {-48, -52, -56, -60, -64, -68, -72, -76, 44, 48, 52, 56, 60, 64, 68};

constexpr int64_t kVectors = kPanel / kLanes;
constexpr int64_t kAloneBytes = 2 << 20; // as in pack_linear: a loader's threads each quantize a part

// The index of the level that is nearest to each lane; from the midpoint on the upper one, and 0 for a NaN.
inline VecI index_of(VecF value) {
    VecI index{};
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) {
        index -= (VecI)(value >= splat(0.5f * static_cast<float>(kTable[i] + kTable[i + 1])));
    }
    return index;
}

inline VecF level_of(VecI index) {
#if defined(__AVX512F__)
    alignas(64) float levels[16];
    for (int i = 0; i < 16; ++i) {
        levels[i] = kTable[i];
    }
    return _mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(levels));
#else
    VecF level;
    for (int i = 0; i < kLanes; ++i) {
        level[i] = kTable[index[i]];
    }
    return level;
#endif
}

inline VecF magnitude(VecF x) {
    return (VecF)((VecU)x & 0x7fffffffu);
}

// The scale of a group, of which each lane has one.
VecF fit(const VecF (&w)[kGroup]) {
    VecF largest{};
    for (int i = 0; i < kGroup; ++i) {
        largest = select(magnitude(w[i]) > magnitude(largest), w[i], largest);
    }
    const VecF divisor = select(largest == splat(0), splat(1), largest);
    VecF parts[kGroup]; // from -1 to 1: no sum overflows
    for (int i = 0; i < kGroup; ++i) {
        parts[i] = w[i] / divisor;
    }
    VecF best = splat(-1), scale{};
    for (const float place : kTries) {
        VecF products{}, squares{};
        for (int i = 0; i < kGroup; ++i) {
            const VecF level = level_of(index_of(parts[i] * splat(place)));
            products += level * parts[i];
            squares += level * level;
        }
        // The squared error with the fitted scale, products / squares, is less by this than without.
        const VecF gain = products * products / squares;
        const VecI better = gain > best;
        best = select(better, gain, best);
        scale = select(better, products / squares, scale);
    }
    return scale * largest;
}

// A vector of rows of a panel.
template <typename T> class Rows {
public:
    Rows(const QuantizeArgs &a, int64_t vector)
        : k_(a.weight.size(1)), stride_(a.weight.stride(0)), first_(vector * kLanes - a.first_row) {
        const int64_t left = a.weight.size(0) - first_;
        begin_ = static_cast<int>(first_ < 0 ? -first_ : 0);
        end_ = static_cast<int>(left < kLanes ? left : kLanes);
        weight_ = a.weight.as<const T>() + (first_ + begin_) * stride_;
        uint8_t *const panel = a.packed.as<uint8_t>() + vector / kVectors * a.packed.stride(0);
        const int64_t lane = vector % kVectors * kLanes;
        packed_ = panel + lane;
        lines_ = panel + kScaleBytes + 4 * lane;
        scales_ = a.scales.as<float>() + vector * kLanes;
    }

    // scales: room for one of each group.
    void quantize(VecF *scales) const {
        const int64_t groups = (k_ + kGroup - 1) / kGroup, padded = (k_ + kBlock - 1) / kBlock * kBlockGroups;
        VecF most{}, poison{};
        for (int64_t g = 0; g < groups; ++g) {
            VecF w[kGroup];
            load_group(g, w);
            for (const VecF x : w) {
                poison += x * splat(0);
            }
            scales[g] = fit(w);
            most = max(magnitude(scales[g]), most);
        }
        const VecI finite = poison == splat(0);
        const VecF row_scale = most / splat(127);
        put(scales_, select(finite, row_scale, splat(float_of(0x7fc00000))));
        const VecF divisor = select(row_scale > splat(0), row_scale, splat(1));
        for (int64_t g = 0; g < padded; ++g) {
            VecF w[kGroup] = {};
            VecI scale{};
            if (g < groups) {
                load_group(g, w);
                // With a denormal scale of the row, which is coarse, the quotient can exceed 127.
                const VecF steps = min(splat(127), max(splat(-127), scales[g] / divisor));
                scale = (VecI)(steps + splat(0x1.8p23f)) - static_cast<int32_t>(bits_of(0x1.8p23f)); // nearest, even
                scale &= finite;
            }
            const VecF step = __builtin_convertvector(scale, VecF) * row_scale;
            const VecF by = select(step == splat(0), splat(1), step);
            VecI indices[kGroup];
            for (int i = 0; i < kGroup; ++i) {
                indices[i] = index_of(w[i] / by) & finite;
            }
            store_group(g, scale, indices);
        }
    }

private:
    // Lanes outside the rows, and columns beyond k, are 0.
    void load_group(int64_t g, VecF (&w)[kGroup]) const {
        const int64_t first = g * kGroup, count = k_ - first < kGroup ? k_ - first : kGroup;
        alignas(64) float part[kLanes][kGroup] = {};
        for (int lane = begin_; lane < end_; ++lane) {
            const T *row = weight_ + (lane - begin_) * stride_ + first;
            for (int64_t i = 0; i < count; ++i) {
                part[lane][i] = widen(row[i]);
            }
        }
        for (int i = 0; i < kGroup; ++i) {
            for (int lane = 0; lane < kLanes; ++lane) {
                w[i][lane] = part[lane][i];
            }
        }
    }

    void store_group(int64_t g, VecI scale, const VecI (&indices)[kGroup]) const {
        const int64_t block = g / kBlockGroups * kBlockBytes, in_block = g % kBlockGroups;
        for (int lane = begin_; lane < end_; ++lane) {
            packed_[block + in_block * kPanel + lane] = static_cast<uint8_t>(scale[lane]);
            uint8_t *line = lines_ + block + in_block * 2 * kLineBytes + lane * 4;
            for (int half = 0; half < 2; ++half, line += kLineBytes) {
                for (int b = 0; b < 4; ++b) {
                    line[b] = static_cast<uint8_t>(indices[half * 8 + b][lane] | indices[half * 8 + 4 + b][lane] << 4);
                }
            }
        }
    }

    void put(float *to, VecF values) const {
        for (int lane = begin_; lane < end_; ++lane) {
            to[lane] = values[lane];
        }
    }

    int64_t k_, stride_, first_;
    int begin_, end_;
    const T *weight_; // of lane begin_
    uint8_t *packed_; // the scale of lane 0 in the first group
    uint8_t *lines_;  // the indices of lane 0
    float *scales_;
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::quantize_kernel(const QuantizeArgs &args) {
    using namespace infini::INFINI_LEVEL;
    const int64_t rows = args.weight.size(0), begin = args.first_row / kLanes;
    const int64_t end = (args.first_row + rows + kLanes - 1) / kLanes;
    with_float_type(args.weight.dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for_with_scratch(
            end - begin, args.weight.numel() * static_cast<int64_t>(sizeof(T)),
            (args.weight.size(1) + kGroup - 1) / kGroup * static_cast<int64_t>(sizeof(VecF)),
            [&](int64_t first, int64_t last, char *scratch) {
                for (int64_t vector = begin + first; vector < begin + last; ++vector) {
                    Rows<T>(args, vector).quantize(reinterpret_cast<VecF *>(scratch));
                }
            },
            kAloneBytes);
    });
}
