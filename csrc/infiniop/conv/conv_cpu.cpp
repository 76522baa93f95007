// The CPU kernel of conv: im2col, row by row of the matrix, in runs along the last spatial dimension. Limit: the
// product that follows; this kernel copies its right-hand side.
#include "conv.h"
#include "parallel.h"

#include <cstring>

namespace infini::INFINI_LEVEL {
namespace {

// Gathers one row of the matrix: element [c, k...] of the kernel, at all positions of the tile.
template <typename Bits> void gather_row(const conv::Tile &tile, int64_t row, Bits *out) {
    const conv::Args &a = *tile.args;
    const int spatial = a.spatial, last = spatial - 1;
    int64_t kernel[conv::kMaxSpatial], rest = row;
    for (int i = last; i >= 0; --i) {
        kernel[i] = rest % a.w.shape[i + 2];
        rest /= a.w.shape[i + 2];
    }
    const Bits *x = a.x.as<const Bits>() + tile.image * a.x.strides[0] + rest * a.x.strides[1];
    int64_t index[conv::kMaxSpatial]; // the output position; advances by runs along the last dimension
    rest = tile.first;
    for (int i = last; i >= 0; --i) {
        index[i] = rest % a.y.shape[i + 2];
        rest /= a.y.shape[i + 2];
    }
    const int64_t step = a.strides[last], in_size = a.x.shape[last + 2], in_stride = a.x.strides[last + 2];
    for (int64_t done = 0; done < tile.columns;) {
        // The run's offset in the other dimensions. A run outside of x is all 0.
        int64_t offset = 0;
        bool inside = true;
        for (int i = 0; i < last; ++i) {
            const int64_t at = index[i] * a.strides[i] - a.pads[i] + kernel[i] * a.dilations[i];
            inside = inside && at >= 0 && at < a.x.shape[i + 2];
            offset += at * a.x.strides[i + 2];
        }
        const int64_t left = a.y.shape[last + 2] - index[last], rest_of_tile = tile.columns - done;
        const int64_t run = left < rest_of_tile ? left : rest_of_tile;
        if (!inside) {
            std::memset(out + done, 0, static_cast<size_t>(run) * sizeof(Bits));
        } else {
            const int64_t start =
                index[last] * step - a.pads[last] + kernel[last] * a.dilations[last]; // where the run starts in x
            // Positions begin .. end - 1 of the run lie inside x.
            int64_t begin = start >= 0 ? 0 : (-start + step - 1) / step;
            int64_t end = start >= in_size ? 0 : (in_size - start - 1) / step + 1;
            begin = begin < run ? begin : run;
            end = end < run ? end : run;
            end = end < begin ? begin : end;
            std::memset(out + done, 0, static_cast<size_t>(begin) * sizeof(Bits));
            const Bits *from = x + offset + start * in_stride;
            if (step * in_stride == 1) {
                std::memcpy(out + done + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(Bits));
            } else {
                for (int64_t i = begin; i < end; ++i) {
                    out[done + i] = from[i * step * in_stride];
                }
            }
            std::memset(out + done + end, 0, static_cast<size_t>(run - end) * sizeof(Bits));
        }
        done += run;
        index[last] = 0;
        for (int i = last - 1; i >= 0 && ++index[i] == a.y.shape[i + 2]; --i) {
            index[i] = 0;
        }
    }
}

template <typename Bits> void gather(const conv::Tile &tile) {
    const conv::Args &a = *tile.args;
    int64_t rows = 1;
    for (int dim = 1; dim < a.w.ndim; ++dim) {
        rows *= a.w.shape[dim];
    }
    auto *matrix = static_cast<Bits *>(a.workspace);
    const int64_t row_bytes = tile.columns * static_cast<int64_t>(sizeof(Bits));
    parallel_for(rows, rows * row_bytes * 2, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            gather_row(tile, row, matrix + row * tile.columns);
        }
    });
    if (a.bias.dtype != INFINI_DTYPE_INVALID) {
        const int64_t channels = a.w.shape[0], all = a.y.strides[1];
        auto *y = a.y.as<Bits>() + tile.image * a.y.strides[0] + tile.first;
        const auto *bias = a.bias.as<const Bits>();
        parallel_for(channels, channels * row_bytes, [&](int64_t begin, int64_t end) {
            for (int64_t channel = begin; channel < end; ++channel) {
                const Bits value = bias[channel * a.bias.strides[0]];
                for (int64_t i = 0; i < tile.columns; ++i) {
                    y[channel * all + i] = value;
                }
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::conv::INFINI_LEVEL::cpu_kernel(const Tile &tile) {
    using namespace infini::INFINI_LEVEL;
    if (tile.args->x.dtype == INFINI_DTYPE_F32) {
        gather<uint32_t>(tile);
    } else {
        gather<uint16_t>(tile);
    }
}
