// What the loops of gemm share: the operands of a product (or of a rectangle of one), and the blocking of its
// dimensions.
#pragma once

#include "register_tile.h"

namespace infini::INFINI_LEVEL {
namespace {

// Words of k per block. Sums of blocks are added to each other, so a result's bits depend on this number. A panel of b
// of this length takes 32 KiB of the 48 KiB of L1.
constexpr int64_t kBlockWords = 256;

// Splits n into parts of at most `most` (rounded up to `unit`). All parts but the last have one size, a multiple of
// `unit`.
struct EvenSplit {
    int64_t n, size, count;
    EvenSplit(int64_t n_, int64_t most, int64_t unit)
        : n(n_), size(ceil_div(ceil_div(n, ceil_div(n, most)), unit) * unit), count(ceil_div(n, size)) {}
    int64_t begin(int64_t i) const { return i * size; }
    int64_t length(int64_t i) const { return n - i * size < size ? n - i * size : size; }
};

template <typename T> struct Product {
    Operand<T> a, b;
    Output<T> c;
    int64_t m, n, k;
};

// Elements of k that are loaded at once from a row of a, or a column of b, that is contiguous.
template <typename T> constexpr int64_t kStep = kLanes * 4 / static_cast<int64_t>(sizeof(T));

// Splits k into blocks, which fix the order of the sum; they depend on k alone.
template <typename T> EvenSplit blocks_of(int64_t k) {
    return EvenSplit(k, kBlockWords * PackedK<T>::kElements, kStep<T>);
}

} // namespace
} // namespace infini::INFINI_LEVEL
