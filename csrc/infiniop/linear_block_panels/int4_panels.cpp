// Registers the panels of blocks of 4-bit codes with a scale and a zero point.
#include "int4_panels.h"

namespace infini::linear_block_panels {
namespace {

// Of each 2 * kHalf elements the second half is in the upper halves of the bytes.
template <int kHalf> Place place(int e) {
    return {4 + e / (2 * kHalf) * kHalf + e % kHalf, e % (2 * kHalf) / kHalf * 4, 0, 0};
}

const RegisteredPanelKind kinds[] = {
    RegisteredPanelKind({1002, {4, {{0, 2, 1}, {2, 2, 1}}, place<16>}, 32, true, dot_int4_32, decode_int4_32}),
    RegisteredPanelKind({1003, {4, {{0, 2, 1}, {2, 2, 1}}, place<32>}, 64, true, dot_int4_64, decode_int4_64}),
    RegisteredPanelKind({1004, {4, {{0, 2, 1}, {2, 2, 1}}, place<32>}, 128, true, dot_int4_128, decode_int4_128}),
};

} // namespace
} // namespace infini::linear_block_panels
