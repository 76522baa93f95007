// AMX in plain C++, for tests on machines without it: the functions of common/tile_registers.h, with the arithmetic of
// Intel's manual. If a CPU would raise an invalid opcode, the process ends with a message; also if a kernel configures
// tiles without having released the previous ones.
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
    int rows[8] = {}, row_bytes[8] = {}; // per tile
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
};

inline thread_local EmulatedTiles emulated_tiles;

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A bfloat16 as a float; denormals become zero.
inline float bfloat16_of(const uint8_t *p) {
    const uint32_t bits = (static_cast<uint32_t>(p[1]) << 24) | (static_cast<uint32_t>(p[0]) << 16);
    return float_of_bits((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

// A quarter of a tile's row, as a vector type of the compiler, which exists on every machine.
typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourWords __attribute__((vector_size(16)));

inline FourFloats without_denormals(FourFloats x) {
    const FourWords bits = (FourWords)x, normal = (bits & 0x7f800000) != 0;
    return (FourFloats)(bits & (normal | INT32_MIN));
}

// sum + a * b, rounded once. Products of bfloat16 are exact in float unless they leave its range, so a multiplication
// and an addition suffice.
inline FourFloats add_products(FourFloats a, FourFloats b, FourFloats sum) {
    const FourFloats products = a * b;
    const FourWords magnitudes = (FourWords)products & INT32_MAX;
    const FourWords exact = ((magnitudes >= 0x00800000) & (magnitudes < 0x7f800000)) | (a == 0) | (b == 0);
    if ((exact[0] & exact[1] & exact[2] & exact[3]) != 0) {
        return without_denormals(products + sum);
    }
    for (int i = 0; i < 4; ++i) {
        sum[i] = std::fma(a[i], b[i], sum[i]);
    }
    return without_denormals(sum);
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
    tile_zero<kTile>(); // clears what lies beyond the configured rows and columns too
    for (int row = 0; row < tiles.rows[kTile]; ++row) {
        std::memcpy(tiles.data[kTile][row], static_cast<const uint8_t *>(from) + row * pitch,
                    static_cast<size_t>(tiles.row_bytes[kTile]));
    }
}

template <int kTile> void tile_stream(const void *from, int64_t pitch) {
    tile_load<kTile>(from, pitch);
}

template <int kTile> void tile_store(void *to, int64_t pitch) {
    const EmulatedTiles &tiles = emulated_tiles;
    tiles.check(kTile);
    for (int row = 0; row < tiles.rows[kTile]; ++row) {
        std::memcpy(static_cast<uint8_t *>(to) + row * pitch, tiles.data[kTile][row],
                    static_cast<size_t>(tiles.row_bytes[kTile]));
    }
}

// Checks the shapes that the instructions require of sum, left and right; body(row, sums) adds to the sums of a row.
template <typename Sum, int kSum, int kLeft, int kRight, typename Body> void for_each_row(const Body &body) {
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
        Sum sums[16];
        std::memcpy(sums, tiles.data[kSum][row], sizeof sums);
        body(row, sums);
        std::memcpy(tiles.data[kSum][row], sums, static_cast<size_t>(tiles.row_bytes[kSum]));
    }
}

// tdpbf16ps: even and odd products are summed separately, then added to each other, then to the sum.
template <int kSum, int kLeft, int kRight> void tile_dot_bfloat16() {
    const EmulatedTiles &tiles = emulated_tiles;
    FourFloats right[32][4]; // for each element of k, the columns
    for (int i = 0; i < 2 * tiles.rows[kRight]; ++i) {
        for (int column = 0; column < 16; ++column) {
            right[i][column / 4][column % 4] = bfloat16_of(&tiles.data[kRight][i / 2][4 * column + i % 2 * 2]);
        }
    }
    for_each_row<float, kSum, kLeft, kRight>([&](int row, float *sums) {
        FourFloats parts[2][4] = {};
        for (int i = 0; i < 2 * tiles.rows[kRight]; ++i) {
            const float x = bfloat16_of(&tiles.data[kLeft][row][2 * i]);
            for (int quarter = 0; quarter < 4; ++quarter) {
                FourFloats &part = parts[i % 2][quarter];
                part = add_products(FourFloats{x, x, x, x}, right[i][quarter], part);
            }
        }
        for (int quarter = 0; quarter < 4; ++quarter) {
            FourFloats sum;
            std::memcpy(&sum, sums + 4 * quarter, sizeof sum);
            sum = without_denormals(without_denormals(sum) + without_denormals(parts[0][quarter] + parts[1][quarter]));
            std::memcpy(sums + 4 * quarter, &sum, sizeof sum);
        }
    });
}

// tdpbssd and tdpbusd: bytes of type Left times int8, summed in int32, which wraps. A sum of 64 products is exact in
// float, which the compiler vectorizes even if it has no integer vectors.
template <typename Left, int kSum, int kLeft, int kRight> void tile_dot_bytes() {
    const EmulatedTiles &tiles = emulated_tiles;
    float right[64][16]; // for each element of k, the columns
    for (int i = 0; i < 4 * tiles.rows[kRight]; ++i) {
        for (int column = 0; column < 16; ++column) {
            right[i][column] = static_cast<int8_t>(tiles.data[kRight][i / 4][4 * column + i % 4]);
        }
    }
    for_each_row<uint32_t, kSum, kLeft, kRight>([&](int row, uint32_t *sums) {
        float products[16] = {};
        for (int i = 0; i < 4 * tiles.rows[kRight]; ++i) {
            const float left = static_cast<Left>(tiles.data[kLeft][row][i]);
            for (int column = 0; column < 16; ++column) {
                products[column] += left * right[i][column];
            }
        }
        for (int column = 0; column < 16; ++column) {
            sums[column] += static_cast<uint32_t>(static_cast<int32_t>(products[column]));
        }
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
