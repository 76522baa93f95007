// Kind: a way to store a run of a weight's elements in a block of bytes. A source registers its kinds with their decoders;
// to add one, add a source.
#pragma once

#include <cstdint>
#include <string>

#include "execution_context.h"

namespace infini::linear_blocks {

struct DecodeArgs {
    const uint8_t *blocks; // adjacent, at any address
    int64_t count;
    void *to;      // count * elements, float or bfloat16
    bool in_pairs; // bfloat16, denormals flushed: at levels that multiply it in pairs
};

// Up to kDotX rows of x are multiplied by kDotRows rows of blocks while these are decoded.
constexpr int kDotRows = 4, kDotX = 2;

struct DotArgs {
    const uint8_t *blocks; // of the first row; those of a row are adjacent
    int64_t stride;        // bytes from a row to the next
    int64_t count;         // blocks of a row
    int rows, m;           // of blocks, 1 or kDotRows; and of x, 1 or kDotX
    const void *x;         // float, or bfloat16 if in_pairs
    int64_t x_stride;
    bool in_pairs; // blocks are rounded to bfloat16 and multiplied in pairs: at levels that have instructions for it
    float *sums;   // a vector of the level's width for each row of x and of blocks: [m][sums_stride]
    int64_t sums_stride; // in vectors
    int64_t ahead;       // bytes from a block to the one that is prefetched
    bool far;            // into L2
};

struct Kind {
    int64_t number;   // in the op's argument `kind`: GGML's type numbers, and from 1000 on our own
    const char *name; // "q6_k"
    int64_t elements; // of a block: a multiple of 32
    int64_t bytes;    // of a block
    void (*decode)(const ExecutionContext &, const DecodeArgs &);
    void (*dot)(const ExecutionContext &, const DotArgs &); // adds products to sums
};

// A constant of this type adds a kind when the library is loaded.
struct RegisteredKind {
    explicit RegisteredKind(const Kind &kind);
};

// What the codes of IQ4_NL and IQ4_XS stand for.
constexpr int kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice what the codes of FP4 (E2M1), in MXFP4 and NVFP4, stand for.
constexpr int kFp4Levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// nullptr for an unknown number.
const Kind *find_kind(int64_t number);

// "2 (q4_0), 3 (q4_1), ...", for messages.
std::string known_kinds();

} // namespace infini::linear_blocks
