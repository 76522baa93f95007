// The CPU kernel of rearrange. Runs that are dense in both tensors are copied whole; where src and dst are dense in
// different dimensions, square tiles are transposed; the rest is copied element by element.
// Limit: memory bandwidth, each element read once and written once.
#include <cstdlib>
#include <cstring>

#include "level_types.h"
#include "rearrange.h"
#include "strided.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kRunStep = 1 << 14; // a long run is split among threads in steps of this many bytes

// Strides are in bytes from here on, because a run of small elements may be copied as one larger element.

template <int kBytes> void copy_element(char *to, const char *from) {
    std::memcpy(to, from, kBytes);
}

void copy_runs(TensorView (&views)[2], int64_t run) {
    const TensorView *const walked[] = {&views[0], &views[1]};
    const RowIterator<2> rows(walked);
    parallel_rows(rows, run, kRunStep, 2 * rows.count() * run, [&](const int64_t *at, int64_t begin, int64_t end) {
        std::memcpy(views[0].as<char>() + at[0] + begin, views[1].as<const char>() + at[1] + begin,
                    static_cast<size_t>(end - begin));
    });
}

// Replaces dimensions dims, dims + 1, ... by one dimension of size 1, for RowIterator.
void keep_dims(TensorView (&views)[2], int dims) {
    for (TensorView &view : views) {
        view.ndim = dims + 1;
        view.shape[dims] = 1;
    }
}

template <int kBytes> void copy_elements(TensorView (&views)[2]) {
    // If the last dimension is short, the inner loop runs over the longest dimension, once per index of the last.
    const int last = views[0].ndim - 1;
    const bool two = last > 0 && views[0].shape[last] < kShortRow;
    if (two) {
        const int longest = longest_dim(views[0]);
        move_dim(views, longest == last ? last - 1 : longest, last - 1);
    }
    const int dim = two ? last - 1 : last;
    const int64_t n = views[0].shape[dim], to_step = views[0].strides[dim], from_step = views[1].strides[dim];
    const int64_t inner = two ? views[0].shape[last] : 1;
    const int64_t piece = two ? kLine : n;
    const int64_t to_inner = views[0].strides[last], from_inner = views[1].strides[last];
    const int64_t bytes = 2 * views[0].numel() * kBytes;
    keep_dims(views, dim);
    const TensorView *const walked[] = {&views[0], &views[1]};
    const RowIterator<2> rows(walked);
    parallel_rows(rows, n, kLine, bytes, [&](const int64_t *at, int64_t begin, int64_t end) {
        char *to = views[0].as<char>() + at[0];
        const char *from = views[1].as<const char>() + at[1];
        for (int64_t i = begin; i < end; i += piece) {
            const int64_t size = end - i < piece ? end - i : piece;
            for (int64_t j = 0; j < inner; ++j) {
                copy_strided<kBytes>(to + i * to_step + j * to_inner, to_step, from + i * from_step + j * from_inner,
                                     from_step, size);
            }
        }
    });
}

// A tile's side is one cache line of elements. Tiles go through a buffer, so that every line of src and of dst is
// accessed once: the lines of a column may all map to the same cache set.
template <int kBytes>
void transpose_tile(char *to, int64_t to_row, int64_t to_column, const char *from, int64_t from_row,
                    int64_t from_column, int64_t row_count, int64_t column_count) {
    alignas(kLine) char tile[kLine / kBytes][kLine]; // [column][row]
    for (int64_t column = 0; column < column_count; ++column) {
        const char *line = from + column * from_column;
        if (from_row == kBytes && row_count == kLine / kBytes) {
            std::memcpy(tile[column], line, kLine);
        } else {
            for (int64_t row = 0; row < row_count; ++row) {
                copy_element<kBytes>(tile[column] + row * kBytes, line + row * from_row);
            }
        }
    }
    for (int64_t row = 0; row < row_count; ++row) {
        char *line = to + row * to_row;
        if (to_column == kBytes && column_count == kLine / kBytes) {
            for (int64_t column = 0; column < kLine / kBytes; ++column) {
                copy_element<kBytes>(line + column * kBytes, tile[column] + row * kBytes);
            }
        } else {
            for (int64_t column = 0; column < column_count; ++column) {
                copy_element<kBytes>(line + column * to_column, tile[column] + row * kBytes);
            }
        }
    }
}

// Transposes the last two dimensions: the last has the smallest stride in dst, the one before it in src. Tiles are
// processed in square blocks, so that adjacent tiles find shared pages and lines in the TLB and the cache.
template <int kBytes> void copy_tiles(TensorView (&views)[2]) {
    constexpr int64_t kSide = kLine / kBytes, kBlock = 16 * kSide;
    const int64_t row_count = views[0].size(-2), column_count = views[0].size(-1);
    const int64_t to_row = views[0].stride(-2), to_column = views[0].stride(-1);
    const int64_t from_row = views[1].stride(-2), from_column = views[1].stride(-1);
    const int64_t bytes = 2 * views[0].numel() * kBytes;
    keep_dims(views, views[0].ndim - 2);
    const TensorView *const walked[] = {&views[0], &views[1]};
    const RowIterator<2> others(walked);
    const int64_t down = (row_count + kBlock - 1) / kBlock, across = (column_count + kBlock - 1) / kBlock;
    parallel_rows(others, down * across, 1, bytes, [&](const int64_t *at, int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            const int64_t top = block / across * kBlock, left = block % across * kBlock;
            const int64_t bottom = top + kBlock < row_count ? top + kBlock : row_count;
            const int64_t right = left + kBlock < column_count ? left + kBlock : column_count;
            for (int64_t column = left; column < right; column += kSide) {
                for (int64_t row = top; row < bottom; row += kSide) {
                    transpose_tile<kBytes>(views[0].as<char>() + at[0] + row * to_row + column * to_column, to_row,
                                           to_column,
                                           views[1].as<const char>() + at[1] + row * from_row + column * from_column,
                                           from_row, from_column, bottom - row < kSide ? bottom - row : kSide,
                                           right - column < kSide ? right - column : kSide);
                }
            }
        }
    });
}

template <int kBytes> void copy(TensorView (&views)[2]) {
    const TensorView &src = views[1];
    const int last = src.ndim - 1;
    int densest = last;
    for (int dim = last - 1; dim >= 0; --dim) {
        const int64_t stride = std::abs(src.strides[dim]);
        densest = stride != 0 && stride < std::abs(src.strides[densest]) ? dim : densest;
    }
    if (densest == last) {
        copy_elements<kBytes>(views);
    } else {
        move_dim(views, densest, last - 1);
        copy_tiles<kBytes>(views);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::rearrange::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (kOnlyBf16) { // bf16's level would compile the same code
        return INFINI_FLOAT_LEVEL::cpu_kernel(args);
    }
    const auto size = static_cast<int64_t>(size_of(args.dst.dtype));
    TensorView views[] = {args.dst, args.src};
    for (TensorView &view : views) {
        view.dtype = INFINI_DTYPE_BYTE;
        for (int dim = 0; dim < view.ndim; ++dim) {
            view.strides[dim] *= size;
        }
    }
    coalesce_dims(views);
    const TensorView &dst = views[0];
    int64_t run = size;
    if (dst.size(-1) == 1 || (dst.stride(-1) == size && views[1].stride(-1) == size)) {
        run *= dst.size(-1);
        for (TensorView &view : views) {
            view.shape[view.ndim - 1] = 1; // the remaining dimensions iterate over runs
        }
    }
    const bool element = run == 1 || run == 2 || run == 4 || run == 8 || run == 16;
    if (!element) {
        return copy_runs(views, run);
    }
    coalesce_dims(views);
    switch (run) {
    case 1:
        return copy<1>(views);
    case 2:
        return copy<2>(views);
    case 4:
        return copy<4>(views);
    case 8:
        return copy<8>(views);
    default:
        return copy<16>(views);
    }
}
