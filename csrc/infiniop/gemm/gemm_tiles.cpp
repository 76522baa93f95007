// The kernel of gemm in tile registers (tile_product.h), for any shape of bfloat16. b is the operand that is read in
// blocks.
#include "batch.h"
#include "few_tile_rows.h"
#include "parallel.h"
#include "scratch.h"
#include "tile_loops.h"

namespace infini::INFINI_LEVEL {
namespace {

using Bf16Product = Product<bf16>;

constexpr double kParallelProducts = 1 << 20; // threads are used from this many multiply-adds on

// Packs tiles first .. last-1 of a pass that begins at `row` of a.
void pack_tiles(const Bf16Product &p, const Pass<bf16> &pass, int64_t row, int64_t first, int64_t last, char *packed) {
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t left = pass.m - tile * kTmmRows;
        pack_steps(p.a, p.a.data + (row + tile * kTmmRows) * p.a.j_stride, left < kTmmRows ? left : kTmmRows, p.k,
                   p.b.along_k, packed + pass.packed_tile(tile), kPackedStep);
    }
}

// Block i: 32 columns of b.
Block<bf16> block_of(const Bf16Product &p, int64_t i) {
    const int64_t column = i * kPairRows, left = p.n - column;
    Operand<bf16> rows = p.b;
    rows.data += column * rows.j_stride;
    return {rows, left < kPairRows ? left : kPairRows};
}

// Writes sums of a row of c and of columns of a block, from the block's n-th column on.
template <typename Lanes>
void write_sums(const Bf16Product &p, int64_t row, int64_t block, int64_t n, VecF sums, Lanes lanes) {
    bf16 *to = p.c.data + row * p.c.row_stride + (block * kPairRows + n) * p.c.column_stride;
    if (p.c.column_stride == 1) {
        write_vector(p.c, to, sums, lanes);
    } else {
        write_row(p.c, to, reinterpret_cast<const float *>(&sums), lanes);
    }
}

// Computes blocks begin .. end-1 of c for the pass that begins at `row`.
void multiply_columns(const Bf16Product &p, const Pass<bf16> &pass, int64_t row, int64_t begin, int64_t end,
                      const char *packed, char *scratch) {
    multiply_blocks(
        pass, packed, begin, end, [&](int64_t i) { return block_of(p, i); }, scratch,
        [&](int64_t i, int64_t m, int64_t n, VecF sums, auto lanes) { write_sums(p, row + m, i, n, sums, lanes); });
}

void multiply(const gemm::Args &args) {
    const Batch<bf16> batch(args);
    const Bf16Product &whole = batch.product;
    const double products = static_cast<double>(args.c.numel()) * static_cast<double>(whole.k);
    const int64_t threads = products < kParallelProducts || omp_in_parallel() ? 1 : omp_get_max_threads();
    const int64_t blocks = ceil_div(whole.n, kPairRows);
    if (batch.size == 1 && whole.m <= kFewTileRows && whole.b.along_k) {
        return with_few_rows(whole.m, [&](auto m) {
            multiply_few_rows<m>(
                whole.k, blocks,
                [&](int64_t row, int64_t i) { return whole.a.data[row * whole.a.j_stride + i * whole.a.k_stride]; },
                [&](int64_t i) { return block_of(whole, i); },
                [&](int64_t i, int64_t row, int64_t n, VecF sums, auto lanes) {
                    write_sums(whole, row, i, n, sums, lanes);
                });
        });
    }
    const Weights weights = whole.b.along_k ? Weights::kInPlace : Weights::kAcross;
    const auto entry_of = [&](int64_t i) {
        Bf16Product p = whole;
        p.a.data += i * batch.a_step;
        p.b.data += i * batch.b_step;
        p.c.data += i * batch.c_step;
        return p;
    };
    const int64_t row_parts = blocks >= threads                        ? 1
                              : ceil_div(whole.m, kPairRows) < threads ? ceil_div(whole.m, kPairRows)
                                                                       : threads;
    if (batch.size * row_parts >= threads) { // no thread shares its products or rows
        const int64_t part_rows = ceil_div(ceil_div(whole.m, row_parts), kPairRows) * kPairRows;
        const int64_t most = pass_rows(part_rows < whole.m ? part_rows : whole.m, whole.k * 2, weights);
        const Pass<bf16> largest{most, whole.k, weights};
        const int64_t own = largest.packed_bytes() + largest.scratch_bytes();
        auto *const memory = static_cast<char *>(cpu::scratch(static_cast<size_t>(threads * own)));
        const int64_t items = batch.size * row_parts;
        parallel_for(threads, kParallelBytes, [&](int64_t begin, int64_t end) {
            char *const packed = memory + begin * own;
            for (int64_t item = items * begin / threads; item < items * end / threads; ++item) {
                const Bf16Product p = entry_of(item / row_parts);
                const int64_t first = item % row_parts * part_rows;
                const int64_t last = first + part_rows < p.m ? first + part_rows : p.m;
                for (int64_t row = first; row < last; row += most) {
                    const Pass<bf16> pass = largest.with_rows(last - row < most ? last - row : most);
                    pack_tiles(p, pass, row, 0, pass.tiles, packed);
                    multiply_columns(p, pass, row, 0, blocks, packed, packed + largest.packed_bytes());
                }
            }
        });
        return;
    }
    const int64_t most = pass_rows(whole.m, whole.k * 2, weights);
    const Pass<bf16> largest{most, whole.k, weights};
    auto *const packed = static_cast<char *>(
        cpu::scratch(static_cast<size_t>(largest.packed_bytes() + threads * largest.scratch_bytes())));
    for (int64_t entry = 0; entry < batch.size; ++entry) {
        const Bf16Product p = entry_of(entry);
        for (int64_t row = 0; row < p.m; row += most) {
            const Pass<bf16> pass = largest.with_rows(p.m - row < most ? p.m - row : most);
            parallel_for(pass.tiles, pass.m * p.k * 2,
                         [&](int64_t first, int64_t last) { pack_tiles(p, pass, row, first, last, packed); });
            parallel_for(threads, kParallelBytes, [&](int64_t begin, int64_t end) {
                for (int64_t part = begin; part < end; ++part) {
                    multiply_columns(p, pass, row, blocks * part / threads, blocks * (part + 1) / threads, packed,
                                     packed + largest.packed_bytes() + part * largest.scratch_bytes());
                }
            });
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::gemm::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
