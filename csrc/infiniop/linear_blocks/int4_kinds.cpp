// Registers the 4-bit groups of 32, 64 and 128.
#include "int4_kinds.h"

namespace infini::linear_blocks {
namespace {

const RegisteredKind kinds[] = {
    RegisteredKind({1002, "int4_32", 32, 20, decode_int4_32, dot_int4_32}),
    RegisteredKind({1003, "int4_64", 64, 36, decode_int4_64, dot_int4_64}),
    RegisteredKind({1004, "int4_128", 128, 68, decode_int4_128, dot_int4_128}),
};

} // namespace
} // namespace infini::linear_blocks
