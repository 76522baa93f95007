// AMX: eight tile registers of 16 rows of 64 bytes, and their instructions. Included only by *_tiles.cpp files, which
// are compiled for AMX and for its emulation in plain C++ (emulation/tile_registers.h).
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2.
#pragma once

#include <cstdint>

#include "level.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kTmmRows = 16, kTmmRowBytes = 64, kTmmBytes = kTmmRows * kTmmRowBytes;

// The operand of ldtilecfg: the number of rows of each tile, and the bytes of a row. Both are 0 for an unused tile.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

constexpr TileShapes full_tiles() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
        shapes.row_bytes[i] = kTmmRowBytes;
        shapes.rows[i] = kTmmRows;
    }
    return shapes;
}

} // namespace
} // namespace infini::INFINI_LEVEL

#if defined(INFINI_EMULATED_TILES)
#include "../emulation/tile_registers.h"
#else

namespace infini::INFINI_LEVEL {
namespace {

inline void tiles_configure(const TileShapes &shapes) {
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}

inline void tiles_release() {
    asm volatile("tilerelease");
}

template <int kTile> inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads rows that lie `pitch` bytes apart; rows and bytes beyond the configured shape become 0.
template <int kTile> inline void tile_load(const void *from, int64_t pitch) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(pitch) : "memory");
}

// The same as a streaming load, which should not evict other data from L1.
template <int kTile> inline void tile_stream(const void *from, int64_t pitch) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(pitch) : "memory");
}

template <int kTile> inline void tile_store(void *to, int64_t pitch) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(pitch) : "memory");
}

// sum += left @ right. A row of left is a stretch of k; row i of right holds, for each of 16 columns, bytes 4i to 4i +
// 3 of k.
template <int kSum, int kLeft, int kRight> inline void tile_dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

// int8 times int8, and uint8 times int8, with exact sums in int32.
template <int kSum, int kLeft, int kRight> inline void tile_dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

template <int kSum, int kLeft, int kRight> inline void tile_dot_uint8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

} // namespace
} // namespace infini::INFINI_LEVEL

#endif

namespace infini::INFINI_LEVEL {
namespace {

// Configures the calling thread's tiles for a scope; all are 0 at its start. Releases them at its end, because context
// switches save 8 KiB more while tiles are configured.
class TileScope {
public:
    explicit TileScope(const TileShapes &shapes) { tiles_configure(shapes); }
    ~TileScope() { tiles_release(); }
    TileScope(const TileScope &) = delete;
    TileScope &operator=(const TileScope &) = delete;
};

} // namespace
} // namespace infini::INFINI_LEVEL
