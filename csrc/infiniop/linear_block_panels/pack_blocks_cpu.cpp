// The CPU kernels of pack_blocks and unpack_blocks: the codes of 16 rows are moved together, or one by one where a panel
// is not full and where they are unpacked, which only conversions need.
// Limit: of whole panels, gathering the bytes of 16 rows.
#include "linear_block_panels.h"

#include "parallel.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_block_panels::Field;
using linear_block_panels::kPanel;
using linear_block_panels::Layout;
using linear_block_panels::PackArgs;
using linear_block_panels::Place;

// Up to this many bytes the calling thread packs alone: each thread of a loader packs a part.
constexpr int64_t kAloneBytes = 2 << 20;

constexpr int kMostElements = 256, kMostBytes = 256; // of a block

// Where the code of column c of a run lies in its lines, for row 0, and the distance to the next row's, in bits.
struct Target {
    int64_t low_bit, high_bit, low_step, high_step;
};

Target target_of(const Layout &layout, int c) {
    if (layout.bits == 8) {
        return {128 * c, 0, 8, 0};
    }
    const int low_bits = layout.low_bits(), in_line = 32 / low_bits, of_word = 16 * (c % 2);
    const int high_line = layout.run_columns() / in_line;
    return {512 * (c / in_line) + of_word + low_bits * (c % in_line / 2),
            512 * high_line + of_word + layout.high_bits() * (c / 2), 32, 32};
}

// Where a block of a panel begins.
struct BlockPlace {
    uint8_t *header, *lines;
    BlockPlace(const PackArgs &a, int64_t panel, int64_t block) {
        const int64_t blocks = a.packed.size(1), bytes = kPanel * a.block->bytes;
        const int64_t header_bytes = a.kind->layout.header_bytes();
        const int64_t unit_blocks = linear_block_panels::unit_blocks(a.kind->layout.header_bytes());
        const int64_t first = block / unit_blocks * unit_blocks, at = block - first;
        const int64_t count = blocks - first < unit_blocks ? blocks - first : unit_blocks; // of the unit
        uint8_t *const unit = a.packed.as<uint8_t>() + panel * a.packed.stride(0) + first * bytes;
        header = unit + at * header_bytes;
        lines = unit + count * header_bytes + at * (bytes - header_bytes);
    }
};

// Moves the code of each row: kPacks from blocks to panels, otherwise back. Rows begin .. end-1 of the panel.
template <bool kPacks> void move_block(const PackArgs &a, int64_t panel, int64_t block, int64_t begin, int64_t end) {
    const Layout &layout = a.kind->layout;
    const int64_t elements = a.block->elements, bytes = a.block->bytes;
    const BlockPlace at(a, panel, block);
    uint8_t *header = at.header, *lines = at.lines;
    const int64_t stride = a.weight.stride(0);
    uint8_t *const rows = a.weight.as<uint8_t>() + (panel * kPanel - a.first_row) * stride + block * bytes;
    for (const Field &field : layout.fields) {
        for (int i = 0; i < field.count; ++i, header += kPanel * field.bytes) {
            for (int64_t row = begin; row < end; ++row) {
                uint8_t *const own = rows + row * stride + field.at + i * field.bytes;
                uint8_t *const of_row = header + row * field.bytes;
                std::memcpy(kPacks ? of_row : own, kPacks ? own : of_row, static_cast<size_t>(field.bytes));
            }
        }
    }
    const int low_mask = (1 << layout.low_bits()) - 1, high_mask = (1 << layout.high_bits()) - 1;
    const auto copy = [](const uint8_t *from, int from_shift, uint8_t *to, int to_shift, int mask) {
        *to = static_cast<uint8_t>((*to & ~(mask << to_shift)) | ((*from >> from_shift & mask) << to_shift));
    };
    for (int64_t e = 0; e < elements; ++e) {
        const Place place = layout.place(static_cast<int>(e));
        const int c = static_cast<int>(e % layout.run_columns());
        const Target target = target_of(layout, c);
        for (int64_t row = begin; row < end; ++row) {
            uint8_t *const own = rows + row * stride;
            const int64_t low = target.low_bit + row * target.low_step, high = target.high_bit + row * target.high_step;
            if constexpr (kPacks) {
                copy(own + place.byte, place.shift, lines + low / 8, low % 8, low_mask);
                if (high_mask != 0) {
                    copy(own + place.high_byte, place.high_shift, lines + high / 8, high % 8, high_mask);
                }
            } else {
                copy(lines + low / 8, low % 8, own + place.byte, place.shift, low_mask);
                if (high_mask != 0) {
                    copy(lines + high / 8, high % 8, own + place.high_byte, place.high_shift, high_mask);
                }
            }
        }
        if (c == layout.run_columns() - 1) {
            lines += layout.run_bytes();
        }
    }
}

typedef uint8_t Bytes __attribute__((vector_size(16))); // of 16 rows

// The bytes of two vectors by turns.
inline void zip(Bytes a, Bytes b, Bytes &first, Bytes &second) {
    first = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    second = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Byte i of vector j becomes byte j of vector i.
inline void transpose(Bytes (&of)[kPanel]) {
    for (int round = 0; round < 4; ++round) {
        Bytes next[kPanel];
        for (int i = 0; i < kPanel / 2; ++i) {
            zip(of[i], of[i + kPanel / 2], next[2 * i], next[2 * i + 1]);
        }
        std::memcpy(of, next, sizeof next);
    }
}

// A line of 64 bytes: four bytes of each row.
inline void store_line(uint8_t *line, const Bytes (&of)[4]) {
    Bytes even[2], odd[2], rows[4];
    zip(of[0], of[2], even[0], even[1]);
    zip(of[1], of[3], odd[0], odd[1]);
    zip(even[0], odd[0], rows[0], rows[1]);
    zip(even[1], odd[1], rows[2], rows[3]);
    std::memcpy(line, rows, sizeof rows);
}

// The codes of some columns of 16 rows, `bits` of each from `shift` on, as a line: those of even columns in order, then
// those of odd ones.
template <int bits> void store_codes(uint8_t *line, const Bytes *codes, int shift) {
    constexpr int in_byte = 8 / bits;
    Bytes of[4] = {};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < in_byte; ++j) {
            const int column = 2 * (i % 2 * in_byte + j) + i / 2;
            of[i] |= ((codes[column] >> static_cast<uint8_t>(shift)) & static_cast<uint8_t>((1 << bits) - 1))
                     << static_cast<uint8_t>(j * bits);
        }
    }
    store_line(line, of);
}

// Packs a block of a panel that has all its rows. places: those of the block's elements.
void pack_whole(const PackArgs &a, int64_t panel, int64_t block, const Place *places) {
    const Layout &layout = a.kind->layout;
    const int elements = static_cast<int>(a.block->elements), bytes = static_cast<int>(a.block->bytes);
    const BlockPlace at(a, panel, block);
    const uint8_t *const rows =
        a.weight.as<const uint8_t>() + (panel * kPanel - a.first_row) * a.weight.stride(0) + block * bytes;
    Bytes columns[kMostBytes];
    for (int first = 0; first < bytes; first += kPanel) {
        const int count = bytes - first < kPanel ? bytes - first : kPanel;
        Bytes of_rows[kPanel] = {};
        for (int row = 0; row < kPanel; ++row) {
            std::memcpy(&of_rows[row], rows + row * a.weight.stride(0) + first, static_cast<size_t>(count));
        }
        transpose(of_rows);
        std::memcpy(columns + first, of_rows, sizeof of_rows);
    }
    uint8_t *header = at.header;
    for (const Field &field : layout.fields) {
        for (int i = 0; i < field.count; ++i, header += kPanel * field.bytes) {
            for (int row = 0; row < kPanel; ++row) {
                for (int byte = 0; byte < field.bytes; ++byte) {
                    header[row * field.bytes + byte] = columns[field.at + i * field.bytes + byte][row];
                }
            }
        }
    }
    uint8_t *line = at.lines;
    if (layout.bits == 8) {
        for (int e = 0; e < elements; ++e, line += kPanel) {
            std::memcpy(line, &columns[places[e].byte], kPanel);
        }
        return;
    }
    Bytes codes[kMostElements];
    const int low_bits = layout.low_bits(), high_bits = layout.high_bits();
    // Bytes: vectors take no wider scalar.
    const auto low_mask = static_cast<uint8_t>((1 << low_bits) - 1), above = static_cast<uint8_t>(low_bits);
    const auto high_mask = static_cast<uint8_t>((1 << high_bits) - 1);
    for (int e = 0; e < elements; ++e) {
        const Place &place = places[e];
        codes[e] = columns[place.byte] >> static_cast<uint8_t>(place.shift) & low_mask;
        if (high_bits > 0) {
            codes[e] |= (columns[place.high_byte] >> static_cast<uint8_t>(place.high_shift) & high_mask) << above;
        }
    }
    for (int first = 0; first < elements; first += layout.run_columns()) {
        for (int column = 0; column < layout.run_columns(); column += 32 / low_bits, line += 64) {
            const Bytes *const of = codes + first + column;
            low_bits == 4 ? store_codes<4>(line, of, 0) : store_codes<2>(line, of, 0);
        }
        if (high_bits > 0) {
            const Bytes *const of = codes + first;
            high_bits == 1 ? store_codes<1>(line, of, low_bits) : store_codes<2>(line, of, low_bits);
            line += 64;
        }
    }
}

template <bool kPacks> void move(const PackArgs &a) {
    const int64_t rows = a.weight.size(0), blocks = a.weight.size(1);
    Place places[kMostElements];
    for (int e = 0; e < a.block->elements; ++e) {
        places[e] = a.kind->layout.place(e);
    }
    const int64_t first_panel = a.first_row / kPanel, end_panel = (a.first_row + rows + kPanel - 1) / kPanel;
    parallel_for(
        end_panel - first_panel, a.weight.numel(),
        [&](int64_t first, int64_t last) {
            for (int64_t panel = first_panel + first; panel < first_panel + last; ++panel) {
                const int64_t begin = a.first_row - panel * kPanel, end = begin + rows;
                for (int64_t block = 0; block < blocks; ++block) {
                    if (kPacks && begin <= 0 && end >= kPanel) {
                        pack_whole(a, panel, block, places);
                        continue;
                    }
                    move_block<kPacks>(a, panel, block, begin > 0 ? begin : 0, end < kPanel ? end : kPanel);
                }
            }
        },
        kAloneBytes);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_block_panels::INFINI_LEVEL::pack_kernel(const PackArgs &args) {
    infini::INFINI_LEVEL::move<true>(args);
}

void infini::linear_block_panels::INFINI_LEVEL::unpack_kernel(const PackArgs &args) {
    infini::INFINI_LEVEL::move<false>(args);
}
