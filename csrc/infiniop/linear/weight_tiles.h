// When products of some rows of x by quantized weights are computed in tiles (weight_tiles.cuh), how k is split among
// thread blocks, and the workspace for the parts' sums. Used by the ops that stream quantized weights on CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infini::weight_tiles {

constexpr int64_t kWeightRows = 128;   // of a tile
constexpr int64_t kBlocksWanted = 264; // two for each multiprocessor of an H100
constexpr int64_t kStageBytes = 128;   // of each row of the weight, that are copied to shared memory together
constexpr int64_t kMinStages = 4;      // for each part of k

// Whether tiles are faster than streaming m rows of x: from 33 rows on, or from 17 with weights of 32 MB. Measured on an
// H200: 32 rows of bfloat16 by int8 14336 x 4096 29 us for 37, 4096 x 4096 15 us for 12.
constexpr bool fits(int64_t m, int64_t n, int64_t row_bytes) {
    return m > 32 || (m > 16 && n * row_bytes >= (32 << 20));
}

// The thread blocks that share k, if x has too few rows to give each multiprocessor a tile. They depend on the weight's
// size alone, and on whether x has more than kMostSplit rows, as does the order of a row's sums.
constexpr int64_t kMostSplit = 128;

struct Split {
    int64_t parts, stages; // stages: of each part but the last, which may have fewer

    Split(int64_t m, int64_t n, int64_t row_bytes) {
        const int64_t tiles = (n + kWeightRows - 1) / kWeightRows, all = (row_bytes + kStageBytes - 1) / kStageBytes;
        int64_t wanted = tiles > 0 && m <= kMostSplit ? kBlocksWanted / tiles : 1;
        wanted = wanted < all / kMinStages ? wanted : all / kMinStages;
        parts = wanted > 1 ? wanted : 1;
        stages = (all + parts - 1) / parts;
        parts = stages > 0 ? (all + stages - 1) / stages : 1;
    }
};

constexpr int64_t padded_columns(int64_t n) { // for vectors of four
    return (n + 3) / 4 * 4;
}

// The bytes of the parts' sums of m rows of x; none if one block sees all of k.
inline size_t workspace_bytes(int64_t m, int64_t n, int64_t row_bytes) {
    const Split split(m, n, row_bytes);
    return split.parts > 1 ? static_cast<size_t>(split.parts * m * padded_columns(n)) * sizeof(float) : 0;
}

} // namespace infini::weight_tiles
