// PanelKind: how blocks of a kind of linear_blocks lie in panels of 16 rows, and its kernels. A source registers its
// kinds; to add one, add a source.
#pragma once

#include <cstdint>
#include <string>

#include "cpu_capability.h"
#include "execution_context.h"
#include "linear_blocks/kinds.h"

namespace infini::linear_block_panels {

constexpr int kPanel = 16; // rows

// A field of a block that is no element's code: `count` numbers of `bytes` bytes each, from byte `at` on.
struct Field {
    int at, bytes, count;
};

// Where an element's code lies in its block: its lower bits, two, four or eight, and the others.
struct Place {
    int byte, shift, high_byte, high_shift;
};

// A panel is 16 rows of a weight. Its blocks (each of 16 rows) are in units, the last one of what is left: the headers
// of the unit's blocks, then their lines. A unit has the fewest blocks whose headers fill lines of 64 bytes, but one
// of headers that are longer. So a panel is read from its begin to its end, and lines are aligned but for q6_k's.
// A header is the fields, of each number the 16 rows' together. Lines have 64 bytes, with the columns' codes in order:
//   8 bits: the bytes of 16 rows, for each of 4 columns;
//   b = 4 or 2 bits: bits b * (c / 2) and above of word 2 * row + c % 2 are those of column c, of 8 or 16;
//   5 = 4 + 1, 6 = 4 + 2 or 3 = 2 + 1 bits: lines of the lower bits, then one of the upper ones, stored so as well.
// So a panel has as many bytes as its blocks.
constexpr int unit_blocks(int header_bytes) {
    return header_bytes < 64 ? 64 / header_bytes : 1;
}

struct Layout {
    int bits;
    Field fields[3]; // unused ones have no numbers
    Place (*place)(int element);

    constexpr int header_bytes() const {
        int bytes = 0;
        for (const Field &field : fields) {
            bytes += field.bytes * field.count * kPanel;
        }
        return bytes;
    }
    // Of a code, and the columns and bytes of the lines that belong together.
    constexpr int low_bits() const { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }
    constexpr int high_bits() const { return bits - low_bits(); }
    constexpr int run_columns() const { return 32 / (high_bits() > 0 ? high_bits() : low_bits()); }
    constexpr int run_bytes() const { return kPanel * run_columns() * bits / 8; }
};

// What belongs to a group of a row of x: its sum; and where x became integers, their sum, and the scale of each.
struct Numbers {
    float sum;
    float scale;
    int32_t whole;
};

// The products of a panel and some rows of x, which are interleaved word by word: two elements, in bfloat16 or as
// integers of 16 bits, as the level multiplies them.
struct DotArgs {
    const uint8_t *panel;
    int64_t blocks;
    int m;                  // rows of x: 1, 2, 4 or 8
    const uint32_t *x;      // [words][m]
    const Numbers *numbers; // [groups][m]
    float *y;               // [m][kPanel]
};

// Decodes blocks of a panel, from the begin of a unit: two codes in a word, and the numbers of their groups.
struct DecodeArgs {
    const uint8_t *panel;
    int64_t blocks;
    uint32_t *words;        // [words][kPanel]
    float *scales, *shifts; // [groups][kPanel]
};

struct PanelKind {
    int64_t number; // linear_blocks' number of the kind
    Layout layout;
    int group;   // columns with one scale
    bool shifts; // whether elements are code * scale + shift, not code * scale
    // Those of levels below AVX2 do nothing.
    void (*dot)(const ExecutionContext &, const DotArgs &);
    void (*decode)(const ExecutionContext &, const DecodeArgs &);
};

// A constant of this type adds a kind when the library is loaded.
struct RegisteredPanelKind {
    explicit RegisteredPanelKind(const PanelKind &kind);
};

// nullptr for a kind of block that has no panels, or an unknown number.
const PanelKind *find_panel_kind(int64_t number);

// "2 (q4_0), 3 (q4_1), ...", for messages.
std::string known_panel_kinds();

} // namespace infini::linear_block_panels

// Declares dot_NAME and decode_NAME, within the namespace linear_block_panels.
#define INFINI_DECLARE_PANEL_KIND(name)                                                                                \
    INFINI_CPU_KERNEL(dot_##name, DotArgs)                                                                                                  \
    INFINI_CPU_KERNEL(decode_##name, DecodeArgs)
