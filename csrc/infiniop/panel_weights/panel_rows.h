// Quantizes rows of a weight into panels. Each lane handles a row, so sums run over a group's columns in order, and
// every level gives the same bits.
#pragma once

#include "panel_weights.h"
#include "parallel.h"
#include "quantize_row.h"

namespace infini::INFINI_LEVEL {
namespace {

using namespace panels;

constexpr int64_t kVectors = kPanel / kLanes;
constexpr int64_t kAloneBytes = 2 << 20; // as in pack_linear: each thread of a loader quantizes a part

inline VecF magnitude(VecF x) {
    return (VecF)((VecU)x & 0x7fffffffu);
}

// A vector of a panel's rows, some of which are to be quantized.
template <typename T, typename Layout> class PanelRows {
public:
    PanelRows(const QuantizeArgs &a, int64_t vector)
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

    int64_t groups() const { return (k_ + kGroup - 1) / kGroup; }
    int begin() const { return begin_; } // the first lane that is a row to quantize; likewise the end
    int end() const { return end_; }

    // Loads the columns of group g; lanes outside the rows, and columns beyond k, are 0.
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

    // group_scales: room for the full-precision scale of each group, which fit(w) returns. The row's scale is the
    // largest of them divided by 127, or NaN if the row holds infinity or NaN. store(group, w, scale, step, finite)
    // writes a group, where scale is round(quotient) and step = scale * the row's scale; groups beyond k hold zeros.
    template <typename Fit, typename Round, typename Store>
    void quantize(VecF *group_scales, const Fit &fit, const Round &round, const Store &store) const {
        VecF most{}, poison{};
        for (int64_t g = 0; g < groups(); ++g) {
            VecF w[kGroup];
            load_group(g, w);
            for (const VecF x : w) {
                poison += x * splat(0);
            }
            group_scales[g] = fit(w);
            most = max(magnitude(group_scales[g]), most);
        }
        const VecI finite = poison == splat(0);
        const VecF row_scale = most / splat(127);
        const VecF written = select(finite, row_scale, splat(float_of(0x7fc00000)));
        for (int lane = begin_; lane < end_; ++lane) {
            scales_[lane] = written[lane];
        }
        const VecF divisor = select(row_scale > splat(0), row_scale, splat(1));
        const int64_t padded = (k_ + kBlock - 1) / kBlock * kBlockGroups;
        for (int64_t g = 0; g < padded; ++g) {
            VecF w[kGroup] = {};
            VecI scale{};
            if (g < groups()) {
                load_group(g, w);
                // If the row's scale is denormal, and so imprecise, the quotient can exceed 127.
                scale = round(min(splat(127), max(splat(-127), group_scales[g] / divisor))) & finite;
            }
            uint8_t *const to = packed_ + g / kBlockGroups * Layout::kBlockBytes + g % kBlockGroups * kPanel;
            for (int lane = begin_; lane < end_; ++lane) {
                to[lane] = static_cast<uint8_t>(scale[lane]);
            }
            const VecF step = __builtin_convertvector(scale, VecF) * row_scale;
            store(g, w, select(step == splat(0), splat(1), step), finite);
        }
    }

    // Where the first lane's bytes of line `line` of a group are.
    uint8_t *line(int64_t g, int64_t line) const {
        constexpr int64_t kGroupLines = (Layout::kBlockBytes - kScaleBytes) / kLineBytes / kBlockGroups;
        const int64_t in_block = g % kBlockGroups * kGroupLines + line;
        return lines_ + g / kBlockGroups * Layout::kBlockBytes + in_block * kLineBytes;
    }

private:
    int64_t k_, stride_, first_;
    int begin_, end_;
    const T *weight_; // at lane begin_
    uint8_t *packed_; // at lane 0's scale in the first group
    uint8_t *lines_;  // at the first bytes of lane 0
    float *scales_;
};

// Calls quantize_rows(PanelRows, scratch for the scales of a vector of rows) for all rows.
template <typename Layout, typename QuantizeRows>
void quantize_panels(const QuantizeArgs &args, const QuantizeRows &quantize_rows) {
    const int64_t rows = args.weight.size(0), begin = args.first_row / kLanes;
    const int64_t end = (args.first_row + rows + kLanes - 1) / kLanes;
    with_float_type(args.weight.dtype, [&](auto type) {
        using T = decltype(type);
        parallel_for_with_scratch(
            end - begin, args.weight.numel() * static_cast<int64_t>(sizeof(T)),
            (args.weight.size(1) + kGroup - 1) / kGroup * static_cast<int64_t>(sizeof(VecF)),
            [&](int64_t first, int64_t last, char *scratch) {
                for (int64_t vector = begin + first; vector < begin + last; ++vector) {
                    quantize_rows(PanelRows<T, Layout>(args, vector), reinterpret_cast<VecF *>(scratch));
                }
            },
            kAloneBytes);
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL
