// Element types: the C++ types bf16 and f16 (storage only: arithmetic is done in float) and facts about each
// infiniDtype_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "infinicore.h"

namespace infini {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

constexpr size_t size_of(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_BYTE:
    case INFINI_DTYPE_BOOL:
    case INFINI_DTYPE_I8:
    case INFINI_DTYPE_U8:
    case INFINI_DTYPE_F8:
        return 1;
    case INFINI_DTYPE_I16:
    case INFINI_DTYPE_U16:
    case INFINI_DTYPE_F16:
    case INFINI_DTYPE_BF16:
    case INFINI_DTYPE_C16:
        return 2;
    case INFINI_DTYPE_I32:
    case INFINI_DTYPE_U32:
    case INFINI_DTYPE_F32:
    case INFINI_DTYPE_C32:
        return 4;
    case INFINI_DTYPE_I64:
    case INFINI_DTYPE_U64:
    case INFINI_DTYPE_F64:
    case INFINI_DTYPE_C64:
        return 8;
    case INFINI_DTYPE_C128:
        return 16;
    default:
        return 0;
    }
}

constexpr bool is_half(infiniDtype_t dtype) {
    return dtype == INFINI_DTYPE_F16 || dtype == INFINI_DTYPE_BF16;
}

// The name a message uses: PyTorch's where there is one.
constexpr const char *name_of(infiniDtype_t dtype) {
    constexpr const char *names[] = {"invalid",   "byte",      "bool",      "int8",       "int16",
                                     "int32",     "int64",     "uint8",     "uint16",     "uint32",
                                     "uint64",    "float8",    "float16",   "float32",    "float64",
                                     "complex16", "complex32", "complex64", "complex128", "bfloat16"};
    return static_cast<unsigned>(dtype) < sizeof(names) / sizeof(names[0]) ? names[dtype] : "unknown";
}

} // namespace infini
