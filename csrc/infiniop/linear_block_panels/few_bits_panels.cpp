// Registers the panels of GGML's kinds of few bits: where their fields and codes lie in a block.
#include "few_bits_panels.h"

namespace infini::linear_block_panels {
namespace {

// 256 elements of two bits: of each 128, those of a quarter in the same bits of 32 bytes from kFrom on.
template <int kFrom> Place quarters(int e) {
    return {kFrom + e / 128 * 32 + e % 32, e % 128 / 32 * 2, 0, 0};
}

// The same, with third bits from byte 0 on.
Place of_q3_k(int e) {
    const Place low = quarters<32>(e);
    return {low.byte, low.shift, e % 32, e / 32};
}

// Of each 32 elements, the second half in the upper halves.
Place of_iq4_xs(int e) {
    return {8 + e / 32 * 16 + e % 16, e % 32 / 16 * 4, 0, 0};
}

const RegisteredPanelKind kinds[] = {
    RegisteredPanelKind({10, {2, {{80, 2, 1}, {82, 2, 1}, {0, 1, 16}}, quarters<16>}, 16, true, dot_q2_k, decode_q2_k}),
    RegisteredPanelKind({11, {3, {{108, 2, 1}, {96, 4, 3}}, of_q3_k}, 16, false, dot_q3_k, decode_q3_k}),
    RegisteredPanelKind({23, {4, {{0, 2, 1}, {2, 2, 1}, {4, 4, 1}}, of_iq4_xs}, 32, false, dot_iq4_xs, decode_iq4_xs}),
};

} // namespace
} // namespace infini::linear_block_panels
