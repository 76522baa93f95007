// Registers the panels of GGML's kinds of blocks: where their fields and codes lie in a block.
#include "ggml_panels.h"

namespace infini::linear_block_panels {
namespace {

// 32 elements, of which the second half is in the upper halves of the bytes from kFrom on.
template <int kFrom> Place halves(int e) {
    return {kFrom + e % 16, 4 * (e / 16), 0, 0};
}

// The same, with fifth bits from byte kFifth on.
template <int kFrom, int kFifth> Place halves_and_fifth(int e) {
    return {kFrom + e % 16, 4 * (e / 16), kFifth + e / 8, e % 8};
}

Place bytes(int e) {
    return {2 + e, 0, 0, 0};
}

// 256 elements, of each 64 the second half in the upper halves.
Place of_q4_k(int e) {
    return {16 + e / 64 * 32 + e % 32, e % 64 / 32 * 4, 0, 0};
}

Place of_q5_k(int e) {
    return {48 + e / 64 * 32 + e % 32, e % 64 / 32 * 4, 16 + e % 32, e / 32};
}

Place of_q6_k(int e) {
    const int part = e / 128, quarter = e % 128 / 32, i = e % 32;
    return {64 * part + 32 * (quarter % 2) + i, 4 * (quarter / 2), 128 + 32 * part + i, 2 * quarter};
}

constexpr Field kHalf{0, 2, 1}, kSecondHalf{2, 2, 1};

const RegisteredPanelKind kinds[] = {
    RegisteredPanelKind({2, {4, {kHalf}, halves<2>}, 32, false, dot_q4_0, decode_q4_0}),
    RegisteredPanelKind({3, {4, {kHalf, kSecondHalf}, halves<4>}, 32, true, dot_q4_1, decode_q4_1}),
    RegisteredPanelKind({6, {5, {kHalf}, halves_and_fifth<6, 2>}, 32, false, dot_q5_0, decode_q5_0}),
    RegisteredPanelKind({7, {5, {kHalf, kSecondHalf}, halves_and_fifth<8, 4>}, 32, true, dot_q5_1, decode_q5_1}),
    RegisteredPanelKind({8, {8, {kHalf}, bytes}, 32, false, dot_q8_0, decode_q8_0}),
    RegisteredPanelKind({12, {4, {kHalf, kSecondHalf, {4, 4, 3}}, of_q4_k}, 32, true, dot_q4_k, decode_q4_k}),
    RegisteredPanelKind({13, {5, {kHalf, kSecondHalf, {4, 4, 3}}, of_q5_k}, 32, true, dot_q5_k, decode_q5_k}),
    RegisteredPanelKind({14, {6, {{208, 2, 1}, {192, 1, 16}}, of_q6_k}, 16, false, dot_q6_k, decode_q6_k}),
    RegisteredPanelKind({20, {4, {kHalf}, halves<2>}, 32, false, dot_iq4_nl, decode_iq4_nl}),
    RegisteredPanelKind({39, {4, {{0, 1, 1}}, halves<1>}, 32, false, dot_mxfp4, decode_mxfp4}),
};

} // namespace
} // namespace infini::linear_block_panels
