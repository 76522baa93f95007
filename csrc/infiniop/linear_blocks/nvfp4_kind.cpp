// Registers NVFP4.
#include "nvfp4_kind.h"

namespace infini::linear_blocks {
namespace {

const RegisteredKind nvfp4({1005, "nvfp4", 128, 76, decode_nvfp4, dot_nvfp4});

} // namespace
} // namespace infini::linear_blocks
