// The CPU kernel of int8_gemm: Int8Product of bytes, with columns of the weights as its weight rows.
// Limit: for few rows the memory bandwidth of the weights, for many the multiply-adds of bytes (VNNI: 64 per unit and
// cycle); for weights that are not column-major their transposition, block by block.
#include "int8_gemm.h"
#include "int8_epilogue.h"
#include "parallel.h"
#include "int8_product.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using int8_gemm::Args;

constexpr int64_t kMaxRows = 1024; // rows of x in memory at once; the weights are packed again for the next ones

bool are_columns(const TensorView &weights) {
    return weights.stride(0) == 1 || weights.size(0) <= 1;
}

// Gathers columns [first, first + columns) one after the other. Takes as many rows at a time as L1 has room for, in
// cache lines.
void gather_columns(const TensorView &weights, int64_t first, int64_t columns, uint8_t *to) {
    constexpr int64_t kDepth = 64;
    const int64_t k = weights.size(0), row = weights.stride(0), column = weights.stride(1);
    const auto *const from = weights.as<const uint8_t>() + first * column;
    for (int64_t at = 0; at < k; at += kDepth) {
        const int64_t end = k - at < kDepth ? k : at + kDepth;
        for (int64_t c = 0; c < columns; ++c) {
            for (int64_t i = at; i < end; ++i) {
                to[c * k + i] = from[i * row + c * column];
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::int8_gemm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const TensorView &w = args.weights;
    const int64_t rows = args.x.size(0), k = args.x.size(1), n = w.size(1);
    const bool gathers = !are_columns(w);
    for (int64_t first = 0; first < rows; first += kMaxRows) {
        const int64_t m = rows - first < kMaxRows ? rows - first : kMaxRows;
        Int8Product<ByteWeights> product(m, k, 1);
        const int64_t block = product.block_rows(), gathered = gathers ? (block * k + 63) / 64 * 64 : 0;
        // Rows of x that share the read of a column count as one, four at a time.
        const int64_t work = n * k * ((m + 3) / 4), threads = parallel_threads(INT64_MAX, work);
        const int64_t pitch = gathered + (product.scratch_bytes() + 63) / 64 * 64;
        const int64_t own = product.padded() > threads * pitch ? product.padded() : threads * pitch;
        char *const memory = static_cast<char *>(cpu::scratch(static_cast<size_t>(product.x_bytes() + own)));
        char *const scratch = memory + product.x_bytes();
        product.set_memory(memory);
        auto *const q = reinterpret_cast<int8_t *>(scratch);
        std::memset(q, 0, static_cast<size_t>(product.padded()));
        for (int64_t row = 0; row < m; ++row) {
            if (k > 0) { // an empty x may have no memory
                std::memcpy(q, args.x.as<const int8_t>() + (first + row) * args.x.stride(0), static_cast<size_t>(k));
            }
            product.set_row(row, q);
        }
        const Int8Epilogue output{args, first};
        parallel_for((n + block - 1) / block, work, [&](int64_t begin, int64_t end) {
            char *const mine = scratch + omp_get_thread_num() % threads * pitch;
            // Contiguous columns are the rows of a single call; others are gathered block by block.
            const int64_t last = end * block < n ? end * block : n, step = gathers ? block : last - begin * block;
            for (int64_t at = begin * block; at < last; at += step) {
                const int64_t count = last - at < step ? last - at : step;
                const uint8_t *columns = w.as<const uint8_t>() + at * w.stride(1);
                int64_t stride = w.stride(1);
                if (gathers) {
                    auto *const to = reinterpret_cast<uint8_t *>(mine + pitch - gathered);
                    gather_columns(w, at, count, to);
                    columns = to;
                    stride = k;
                }
                product.multiply({columns, stride, at, count}, NoScales{}, mine, output);
            }
        });
    }
}
