// Registers FP8 and NF4.
#include "float_kinds.h"

namespace infini::linear_blocks {
namespace {

const RegisteredKind fp8({1000, "fp8", 128, 132, decode_fp8, dot_fp8});
const RegisteredKind nf4({1001, "nf4", 64, 36, decode_nf4, dot_nf4});

} // namespace
} // namespace infini::linear_blocks
