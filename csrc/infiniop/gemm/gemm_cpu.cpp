// The CPU kernel of gemm: operands packed into panels that stay in the caches, multiplied by register tiles.
// Limit: the multiply-add units for many rows, memory bandwidth for few: b is read once.
#include "gemm.h"
#include "parallel.h"
#include "tile.h"

#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

// How the loops are cut, measured on Zen 5 (L1 48 KiB, L2 1 MiB a core, L3 32 MiB).
constexpr int64_t kBlockWords = 256;           // words of k: a panel of b takes 32 KiB of L1; a part of the sum's order
constexpr int64_t kBlockTiles = 32;            // tiles of rows that share a panel of b: with kBlockWords 0.5 MiB of L2
constexpr int64_t kBlockColumns = 2048;        // columns: packed b takes 2 MiB of L3
constexpr int64_t kPassRows = 1024;            // rows that share a packed b: with kBlockColumns 8 MiB of sums in L3
constexpr int64_t kFewRows = 64;               // rows up to which a is packed once, and b one panel at a time
constexpr int64_t kParallelProducts = 1 << 18; // multiply-adds from which on threads pay

// n in pieces of at most `most`, all but the last of one size, which is a multiple of `unit`.
struct Pieces {
    int64_t n, size, count;
    Pieces(int64_t n_, int64_t most, int64_t unit)
        : n(n_), size(ceil_div(ceil_div(n, ceil_div(n, most)), unit) * unit), count(ceil_div(n, size)) {}
    int64_t begin(int64_t i) const { return i * size; }
    int64_t length(int64_t i) const { return n - i * size < size ? n - i * size : size; }
};

// One matrix product, or a rectangle of one.
template <typename T> struct Product {
    Operand<T> a, b;
    Output<T> c;
    int64_t m, n, k;
};

// The cuts of k, which decide the order of the sum: by k alone.
template <typename T> Pieces blocks_of(int64_t k) {
    constexpr int64_t kElements = Words<T>::kElements;
    return Pieces(k, kBlockWords * kElements, kElements);
}

// How the rows are cut into tiles. Packed, a tile takes `width` words for each word of k.
struct Rows {
    Pieces tiles;
    int64_t width;
    explicit Rows(int64_t m)
        : tiles(m, kTileRows, 1), width(m <= kTileRows ? m : ceil_div(kTileRows, kLanes) * kLanes) {}
};

template <typename T>
void pack_rows(const Product<T> &p, const Pieces &tiles, int64_t width, int64_t row, int64_t rows, int64_t at_k,
               int64_t k, float *out) {
    const int64_t words = ceil_div(k, Words<T>::kElements);
    for (int64_t i = 0; i < rows; i += tiles.size, out += words * width) {
        const int64_t there = rows - i < tiles.size ? rows - i : tiles.size;
        pack(p.a, p.a.data + (row + i) * p.a.j_stride + at_k * p.a.k_stride, there, k, width, out);
    }
}

template <typename T> void write_tile(const Product<T> &p, int64_t row, int64_t column, int64_t m, const float *sums) {
    const int64_t n = p.n - column < kTileColumns ? p.n - column : kTileColumns;
    T *to = p.c.data + row * p.c.row_stride + column * p.c.column_stride;
    for (int64_t i = 0; i < m; ++i, to += p.c.row_stride, sums += kTileColumns) {
        write_row(p.c, to, sums, n);
    }
}

// Few rows: all of a is packed, then each panel of b in turn is packed into L1 and multiplied.
template <typename T> void multiply_few(const Product<T> &p, float *scratch) {
    constexpr int64_t kElements = Words<T>::kElements;
    const Pieces blocks = blocks_of<T>(p.k);
    const Rows rows(p.m);
    const int64_t tile_words = rows.tiles.count * rows.width;
    float *panel = scratch, *a = panel + kBlockWords * kTileColumns;
    for (int64_t block = 0; block < blocks.count; ++block) {
        pack_rows(p, rows.tiles, rows.width, 0, p.m, blocks.begin(block), blocks.length(block),
                  a + block * (blocks.size / kElements) * tile_words);
    }
    alignas(64) float sums[kFewRows * kTileColumns];
    for (int64_t column = 0; column < p.n; column += kTileColumns) {
        const int64_t columns = p.n - column < kTileColumns ? p.n - column : kTileColumns;
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t k = blocks.length(block), block_words = ceil_div(k, kElements);
            pack(p.b, p.b.data + column * p.b.j_stride + blocks.begin(block) * p.b.k_stride, columns, k, kTileColumns,
                 panel);
            const float *a_block = a + block * (blocks.size / kElements) * tile_words;
            for (int64_t tile = 0; tile < rows.tiles.count; ++tile) {
                float *tile_sums = sums + rows.tiles.begin(tile) * kTileColumns;
                multiply_tile<T>(rows.tiles.length(tile), a_block + tile * block_words * rows.width, rows.width, panel,
                                 block_words, tile_sums, block == 0);
                if (block + 1 == blocks.count) {
                    write_tile(p, rows.tiles.begin(tile), column, rows.tiles.length(tile), tile_sums);
                }
            }
        }
    }
}

// Many rows: blocks of b in L3, of a in L2, a panel of b in L1; unfinished sums in L3.
template <typename T> void multiply_many(const Product<T> &p, float *scratch) {
    constexpr int64_t kElements = Words<T>::kElements;
    const Pieces blocks = blocks_of<T>(p.k);
    const Pieces passes(p.m, kPassRows, kTileRows), strips(p.n, kBlockColumns, kTileColumns);
    constexpr int64_t kWidth = ceil_div(kTileRows, kLanes) * kLanes, kTile = kTileRows * kTileColumns;
    float *b = scratch, *a = b + kBlockWords * ceil_div(strips.size, kTileColumns) * kTileColumns;
    float *sums = a + kBlockWords * kBlockTiles * kWidth;
    for (int64_t pass = 0; pass < passes.count; ++pass) {
        const int64_t pass_rows = passes.length(pass);
        const Pieces groups(pass_rows, kBlockTiles * kTileRows, kTileRows);
        for (int64_t strip = 0; strip < strips.count; ++strip) {
            const int64_t first_column = strips.begin(strip), columns = strips.length(strip);
            for (int64_t block = 0; block < blocks.count; ++block) {
                const int64_t k = blocks.length(block), words = ceil_div(k, kElements);
                const int64_t at_k = blocks.begin(block);
                for (int64_t j = 0; j < columns; j += kTileColumns) {
                    pack(p.b, p.b.data + (first_column + j) * p.b.j_stride + at_k * p.b.k_stride,
                         columns - j < kTileColumns ? columns - j : kTileColumns, k, kTileColumns, b + j * words);
                }
                for (int64_t group = 0; group < groups.count; ++group) {
                    const int64_t row = passes.begin(pass) + groups.begin(group);
                    const Pieces tiles(groups.length(group), kTileRows, kTileRows);
                    pack_rows(p, tiles, kWidth, row, groups.length(group), at_k, k, a);
                    for (int64_t j = 0; j < columns; j += kTileColumns) {
                        for (int64_t tile = 0; tile < tiles.count; ++tile) {
                            const int64_t at = (j / kTileColumns * ceil_div(pass_rows, kTileRows) +
                                                groups.begin(group) / kTileRows + tile);
                            float *tile_sums = blocks.count == 1 ? sums : sums + at * kTile;
                            multiply_tile<T>(tiles.length(tile), a + tile * words * kWidth, kWidth, b + j * words,
                                             words, tile_sums, block == 0);
                            if (block + 1 == blocks.count) {
                                write_tile(p, row + tiles.begin(tile), first_column + j, tiles.length(tile), tile_sums);
                            }
                        }
                    }
                }
            }
        }
    }
}

// Floats of scratch for one thread's rectangle.
template <typename T> int64_t scratch_floats(int64_t m, int64_t n, int64_t k) {
    constexpr int64_t kElements = Words<T>::kElements;
    constexpr int64_t kWidth = ceil_div(kTileRows, kLanes) * kLanes;
    if (k == 0) {
        return 0;
    }
    if (m <= kFewRows) {
        const Rows rows(m);
        return kBlockWords * kTileColumns + ceil_div(k, kElements) * rows.tiles.count * rows.width;
    }
    const Pieces passes(m, kPassRows, kTileRows), strips(n, kBlockColumns, kTileColumns);
    return kBlockWords * strips.size + kBlockWords * kBlockTiles * kWidth + passes.size * strips.size + 16;
}

template <typename T> void multiply(const Product<T> &p, float *scratch) {
    if (p.k == 0) {
        const float zeros[kTileRows * kTileColumns] = {};
        for (int64_t i = 0; i < p.m; ++i) {
            for (int64_t j = 0; j < p.n; j += kTileColumns) {
                write_tile(p, i, j, 1, zeros);
            }
        }
    } else if (p.m <= kFewRows) {
        multiply_few(p, scratch);
    } else {
        multiply_many(p, scratch);
    }
}

template <typename T> Operand<T> operand(const TensorView &x, int k_dim, int j_dim) {
    const int64_t k_stride = x.stride(k_dim), j_stride = x.stride(j_dim);
    const bool k_dense = k_stride == 1 || x.size(k_dim) <= 1, j_dense = j_stride == 1 && x.size(j_dim) > 1;
    return {x.as<const T>(), k_stride, j_stride, k_dense && !j_dense};
}

template <typename T> void run(const gemm::Args &args) {
    Product<T> whole = {
        operand<T>(args.a, -1, -2),
        operand<T>(args.b, -2, -1),
        {args.c.as<T>(), args.c.stride(-2), args.c.stride(-1), args.a.size(-1) > 0 ? args.alpha : 0, args.beta},
        args.c.size(-2),
        args.c.size(-1),
        args.a.size(-1)};
    const auto batch_stride = [&](const TensorView &x) { return x.ndim == 3 && x.shape[0] > 1 ? x.strides[0] : 0; };
    int64_t batch = args.c.ndim == 3 ? args.c.shape[0] : 1;
    int64_t c_step = batch_stride(args.c), a_step = batch_stride(args.a), b_step = batch_stride(args.b);
    // The vectors lie along the dimension of c that is contiguous: if that is m, compute c^T = b^T @ a^T.
    if (whole.n == 1 ? whole.m > 1 : whole.c.column_stride != 1 && whole.m > 1) {
        const Operand<T> a = whole.a;
        whole.a = whole.b;
        whole.b = a;
        const int64_t m = whole.m, stride = whole.c.row_stride, step = a_step;
        whole.m = whole.n, whole.n = m;
        whole.c.row_stride = whole.c.column_stride, whole.c.column_stride = stride;
        a_step = b_step, b_step = step;
    }
    // A batch that shares b is one product with more rows.
    if (batch > 1 && b_step == 0 &&
        (whole.m == 1 ? whole.a.along_k
                      : (c_step == whole.m * whole.c.row_stride && a_step == whole.m * whole.a.j_stride))) {
        whole.c.row_stride = whole.m == 1 ? c_step : whole.c.row_stride;
        whole.a.j_stride = whole.m == 1 ? a_step : whole.a.j_stride;
        whole.m *= batch;
        batch = 1;
    }
    const double products =
        static_cast<double>(batch) * static_cast<double>(whole.m * whole.n) * static_cast<double>(whole.k);
    const int64_t limit = omp_in_parallel() || products < kParallelProducts ? 1 : omp_get_max_threads();
    // Parts of each product: enough for all threads, each one's packing as small as it can be.
    const int64_t wanted = batch % limit == 0 || batch >= 8 * limit ? 1 : limit;
    int64_t row_parts = 1;
    for (int64_t parts = 1; parts <= wanted; ++parts) {
        if (wanted % parts == 0 && whole.m / parts > kFewRows &&
            whole.m / parts + whole.n / (wanted / parts) < whole.m / row_parts + whole.n / (wanted / row_parts)) {
            row_parts = parts;
        }
    }
    const Pieces rows(whole.m, ceil_div(whole.m, row_parts), row_parts > 1 ? kTileRows : 1);
    const Pieces columns(whole.n, ceil_div(whole.n, wanted / row_parts), kTileColumns);
    const int64_t items = batch * rows.count * columns.count;
    const int64_t threads = items < limit ? items : limit;
    const int64_t floats = ceil_div(scratch_floats<T>(rows.size, columns.size, whole.k), 1024) * 1024;
    auto *scratch = static_cast<float *>(cpu::scratch(static_cast<size_t>(floats * threads) * sizeof(float)));
    parallel_for(threads, kParallelBytes, [&](int64_t begin, int64_t end) {
        for (int64_t item = items * begin / threads; item < items * end / threads; ++item) {
            const int64_t entry = item / (rows.count * columns.count), row = item / columns.count % rows.count,
                          column = item % columns.count;
            Product<T> p = whole;
            p.m = rows.length(row), p.n = columns.length(column);
            p.a.data += entry * a_step + rows.begin(row) * p.a.j_stride;
            p.b.data += entry * b_step + columns.begin(column) * p.b.j_stride;
            p.c.data += entry * c_step + rows.begin(row) * p.c.row_stride + columns.begin(column) * p.c.column_stride;
            multiply(p, scratch + begin * floats);
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::gemm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.c.dtype, [&](auto type) { infini::INFINI_LEVEL::run<decltype(type)>(args); });
}
