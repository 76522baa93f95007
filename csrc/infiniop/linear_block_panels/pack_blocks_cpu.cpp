// The CPU kernels of pack_blocks and unpack_blocks: for each element of a block, the codes of 16 rows are moved.
// Limit: arithmetic on bytes, one or two of them for each element.
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

// Where the code of column c of a run lies in its lines, for row 0, and the distance to the next row's, in bits.
struct Target {
    int64_t low_bit, high_bit, low_step, high_step;
};

Target target_of(const Layout &layout, int c) {
    if (layout.bits == 8) {
        return {128 * c, 0, 8, 0};
    }
    const int64_t low = 512 * (c / 8) + 16 * (c % 2) + 4 * (c % 8 / 2);
    if (layout.bits == 4) {
        return {low, 0, 32, 0};
    }
    if (layout.bits == 5) {
        return {low, 2048 + 16 * (c % 2) + c / 2, 32, 32};
    }
    return {low, 1024 + 16 * (c % 2) + 2 * (c / 2), 32, 32};
}

// Moves the code of each row: kPacks from blocks to panels, otherwise back. Rows begin .. end-1 of the panel.
template <bool kPacks> void move_block(const PackArgs &a, int64_t panel, int64_t block, int64_t begin, int64_t end) {
    const Layout &layout = a.kind->layout;
    const int64_t blocks = a.packed.size(1), elements = a.block->elements, bytes = a.block->bytes;
    const int64_t header_bytes = layout.header_bytes(),
                  unit_blocks = linear_block_panels::unit_blocks(layout.header_bytes());
    const int64_t first = block / unit_blocks * unit_blocks, at = block - first;
    const int64_t count = blocks - first < unit_blocks ? blocks - first : unit_blocks; // of the unit
    uint8_t *const unit = a.packed.as<uint8_t>() + panel * a.packed.stride(0) + first * kPanel * bytes;
    uint8_t *header = unit + at * header_bytes;
    uint8_t *lines = unit + count * header_bytes + at * (kPanel * bytes - header_bytes);
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
    const int low_mask = layout.bits == 8 ? 0xff : 0x0f, high_mask = layout.bits == 8 ? 0 : (1 << layout.bits >> 4) - 1;
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

template <bool kPacks> void move(const PackArgs &a) {
    const int64_t rows = a.weight.size(0), blocks = a.weight.size(1);
    const int64_t first_panel = a.first_row / kPanel, end_panel = (a.first_row + rows + kPanel - 1) / kPanel;
    parallel_for(
        end_panel - first_panel, a.weight.numel(),
        [&](int64_t first, int64_t last) {
            for (int64_t panel = first_panel + first; panel < first_panel + last; ++panel) {
                const int64_t begin = a.first_row - panel * kPanel, end = begin + rows;
                for (int64_t block = 0; block < blocks; ++block) {
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
