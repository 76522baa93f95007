// The tile registers of AMX in plain C++, for tests on machines without them: the functions of common/tile_registers.h, with the
// arithmetic that Intel's manual describes. What a CPU would answer with an invalid opcode ends the process with a
// sentence here; so does a kernel that configures tiles it has not released.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "../common/level.h"

namespace infini::INFINI_LEVEL {
namespace {

struct EmulatedTiles {
    bool configured = false;
    int rows[8] = {}, row_bytes[8] = {}; // of each tile
    alignas(64) uint8_t data[8][16][64] = {};

    [[noreturn]] static void fail(const char *what, int tile) {
        std::fprintf(stderr, "infini: emulated tiles: %s (tile %d)\n", what, tile);
        std::abort();
    }
    void check(int tile) const {
        if (!configured) {
            fail("no configuration is loaded", tile);
        }
        if (rows[tile] == 0) {
            fail("the configuration leaves this tile out", tile);
        }
    }
    float float_at(int tile, int row, int column) const {
        float value;
        std::memcpy(&value, &data[tile][row][4 * column], sizeof value);
        return value;
    }
};

inline thread_local EmulatedTiles emulated_tiles;

// A bfloat16 as a float; denormals count as zero.
inline float bfloat16_of(const uint8_t *p) {
    const uint32_t bits = (static_cast<uint32_t>(p[1]) << 24) | (static_cast<uint32_t>(p[0]) << 16);
    const uint32_t used = (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
    float value;
    std::memcpy(&value, &used, sizeof value);
    return value;
}

inline float without_denormals(float x) {
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

// a * b + sum, rounded once. Products of bfloat16 are exact in float unless they leave its range.
inline float fma_of_bfloat16(float a, float b, float sum) {
    const float product = a * b, magnitude = std::fabs(product);
    const bool exact = (magnitude >= 0x1p-126f && magnitude <= 0x1.fffffep127f) || a == 0 || b == 0;
    return without_denormals(exact ? product + sum : std::fma(a, b, sum));
}

inline void tiles_configure(const TileShapes &shapes) {
    EmulatedTiles &tiles = emulated_tiles;
    if (tiles.configured) {
        EmulatedTiles::fail("configured anew without a release", 0);
    }
    if (shapes.palette != 1) {
        EmulatedTiles::fail("the palette is not 1", 0);
    }
    for (int i = 0; i < 16; ++i) {
        if (i < 8
                ? shapes.rows[i] > 16 || shapes.row_bytes[i] > 64 || (shapes.rows[i] == 0) != (shapes.row_bytes[i] == 0)
                : shapes.rows[i] != 0 || shapes.row_bytes[i] != 0) {
            EmulatedTiles::fail("the configuration has a shape that no tile can have", i);
        }
    }
    tiles = {};
    tiles.configured = true;
    for (int i = 0; i < 8; ++i) {
        tiles.rows[i] = shapes.rows[i];
        tiles.row_bytes[i] = shapes.row_bytes[i];
    }
}

inline void tiles_release() {
    emulated_tiles.configured = false;
}

template <int kTile> void tile_zero() {
    emulated_tiles.check(kTile);
    std::memset(emulated_tiles.data[kTile], 0, sizeof emulated_tiles.data[kTile]);
}

template <int kTile> void tile_load(const void *from, int64_t pitch) {
    EmulatedTiles &tiles = emulated_tiles;
    tile_zero<kTile>(); // also what lies beyond the configured rows and columns
    for (int row = 0; row < tiles.rows[kTile]; ++row) {
        std::memcpy(tiles.data[kTile][row], static_cast<const uint8_t *>(from) + row * pitch,
                    static_cast<size_t>(tiles.row_bytes[kTile]));
    }
}

template <int kTile> void tile_store(void *to, int64_t pitch) {
    const EmulatedTiles &tiles = emulated_tiles;
    tiles.check(kTile);
    for (int row = 0; row < tiles.rows[kTile]; ++row) {
        std::memcpy(static_cast<uint8_t *>(to) + row * pitch, tiles.data[kTile][row],
                    static_cast<size_t>(tiles.row_bytes[kTile]));
    }
}

// The shapes that the instructions demand of sum, left and right; body(row, column) for each element of sum.
template <int kSum, int kLeft, int kRight, typename Body> void for_each_sum(const Body &body) {
    static_assert(kSum != kLeft && kSum != kRight && kLeft != kRight, "the tiles must be three");
    EmulatedTiles &tiles = emulated_tiles;
    for (const int tile : {kSum, kLeft, kRight}) {
        tiles.check(tile);
        if (tiles.row_bytes[tile] % 4 != 0) {
            EmulatedTiles::fail("rows are no multiple of 4 bytes", tile);
        }
    }
    if (tiles.rows[kSum] != tiles.rows[kLeft] || tiles.row_bytes[kSum] != tiles.row_bytes[kRight] ||
        tiles.row_bytes[kLeft] != 4 * tiles.rows[kRight]) {
        EmulatedTiles::fail("the shapes of a product do not match", kSum);
    }
    for (int row = 0; row < tiles.rows[kSum]; ++row) {
        for (int column = 0; column < tiles.row_bytes[kSum] / 4; ++column) {
            const auto sum = body(row, column);
            std::memcpy(&tiles.data[kSum][row][4 * column], &sum, sizeof sum);
        }
    }
}

// tdpbf16ps: the even and the odd products are added up by themselves, then to each other, then to the sum.
template <int kSum, int kLeft, int kRight> void tile_dot_bfloat16() {
    const EmulatedTiles &tiles = emulated_tiles;
    float left[16][32], right[16][32]; // widened once, not for each of their 16 uses
    for (int row = 0; row < 16; ++row) {
        for (int i = 0; i < 32; ++i) {
            left[row][i] = bfloat16_of(&tiles.data[kLeft][row][2 * i]);
            right[row][i] = bfloat16_of(&tiles.data[kRight][row][2 * i]);
        }
    }
    for_each_sum<kSum, kLeft, kRight>([&](int row, int column) {
        float sums[2] = {};
        for (int word = 0; word < tiles.rows[kRight]; ++word) {
            for (int half = 0; half < 2; ++half) {
                sums[half] = fma_of_bfloat16(left[row][2 * word + half], right[word][2 * column + half], sums[half]);
            }
        }
        const float before = without_denormals(tiles.float_at(kSum, row, column));
        return without_denormals(before + without_denormals(sums[0] + sums[1]));
    });
}

// tdpbssd and tdpbusd: bytes of Left times int8, summed in int32, which wraps.
template <typename Left, int kSum, int kLeft, int kRight> void tile_dot_bytes() {
    const EmulatedTiles &tiles = emulated_tiles;
    for_each_sum<kSum, kLeft, kRight>([&](int row, int column) {
        uint32_t sum;
        std::memcpy(&sum, &tiles.data[kSum][row][4 * column], sizeof sum);
        for (int word = 0; word < tiles.rows[kRight]; ++word) {
            for (int byte = 0; byte < 4; ++byte) {
                const auto left = static_cast<Left>(tiles.data[kLeft][row][4 * word + byte]);
                const auto right = static_cast<int8_t>(tiles.data[kRight][word][4 * column + byte]);
                sum += static_cast<uint32_t>(int{left} * int{right});
            }
        }
        return sum;
    });
}

template <int kSum, int kLeft, int kRight> void tile_dot_int8() {
    tile_dot_bytes<int8_t, kSum, kLeft, kRight>();
}

template <int kSum, int kLeft, int kRight> void tile_dot_uint8() {
    tile_dot_bytes<uint8_t, kSum, kLeft, kRight>();
}

} // namespace
} // namespace infini::INFINI_LEVEL
