// Registers GGML's kinds of blocks.
#include "ggml_kinds.h"

namespace infini::linear_blocks {
namespace {

const RegisteredKind kinds[] = {
    RegisteredKind({2, "q4_0", 32, 18, decode_q4_0, dot_q4_0}),
    RegisteredKind({3, "q4_1", 32, 20, decode_q4_1, dot_q4_1}),
    RegisteredKind({6, "q5_0", 32, 22, decode_q5_0, dot_q5_0}),
    RegisteredKind({7, "q5_1", 32, 24, decode_q5_1, dot_q5_1}),
    RegisteredKind({8, "q8_0", 32, 34, decode_q8_0, dot_q8_0}),
    RegisteredKind({12, "q4_k", 256, 144, decode_q4_k, dot_q4_k}),
    RegisteredKind({13, "q5_k", 256, 176, decode_q5_k, dot_q5_k}),
    RegisteredKind({14, "q6_k", 256, 210, decode_q6_k, dot_q6_k}),
    RegisteredKind({20, "iq4_nl", 32, 18, decode_iq4_nl, dot_iq4_nl}),
    RegisteredKind({39, "mxfp4", 32, 17, decode_mxfp4, dot_mxfp4}),
};

} // namespace
} // namespace infini::linear_blocks
