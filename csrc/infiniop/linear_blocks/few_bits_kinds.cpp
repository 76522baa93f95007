// Registers GGML's kinds of few bits.
#include "few_bits_kinds.h"

namespace infini::linear_blocks {
namespace {

const RegisteredKind kinds[] = {
    RegisteredKind({10, "q2_k", 256, 84, decode_q2_k, dot_q2_k}),
    RegisteredKind({11, "q3_k", 256, 110, decode_q3_k, dot_q3_k}),
    RegisteredKind({23, "iq4_xs", 256, 136, decode_iq4_xs, dot_iq4_xs}),
};

} // namespace
} // namespace infini::linear_blocks
