// Registers the panels of NVFP4: where its fields and codes lie in a block.
#include "nvfp4_panels.h"

namespace infini::linear_block_panels {
namespace {

// Of each 32 elements, the second half in the upper halves.
Place of_nvfp4(int e) {
    return {12 + e / 32 * 16 + e % 16, e % 32 / 16 * 4, 0, 0};
}

const RegisteredPanelKind nvfp4({1005, {4, {{0, 4, 1}, {4, 1, 8}}, of_nvfp4}, 16, false, dot_nvfp4, decode_nvfp4});

} // namespace
} // namespace infini::linear_block_panels
