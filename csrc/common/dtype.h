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

// The name in messages (PyTorch's where it has one) and the bytes of an element.
struct DtypeInfo {
    const char *name;
    size_t size;
};

// By infiniDtype_t. Internal to each object, so that no symbol is shared among instruction sets.
constexpr DtypeInfo kDtypes[] = {{"invalid", 0},   {"byte", 1},      {"bool", 1},        {"int8", 1},
                                 {"int16", 2},     {"int32", 4},     {"int64", 8},       {"uint8", 1},
                                 {"uint16", 2},    {"uint32", 4},    {"uint64", 8},      {"float8", 1},
                                 {"float16", 2},   {"float32", 4},   {"float64", 8},     {"complex16", 2},
                                 {"complex32", 4}, {"complex64", 8}, {"complex128", 16}, {"bfloat16", 2}};
constexpr unsigned kDtypeCount = sizeof(kDtypes) / sizeof(kDtypes[0]);
static_assert(kDtypeCount == INFINI_DTYPE_BF16 + 1);

// 0 for INVALID and for a number that is no dtype.
constexpr size_t size_of(infiniDtype_t dtype) {
    return static_cast<unsigned>(dtype) < kDtypeCount ? kDtypes[dtype].size : 0;
}

// torch's float8 formats, which infiniDtype_t cannot tell apart. No op takes them: views of torch tensors have them
// only so that messages can name them. The numbers are far from infiniDtype_t's, because a caller of the C ABI may pass
// any number.
constexpr infiniDtype_t kFloat8E5M2 = static_cast<infiniDtype_t>(1 << 20);
constexpr infiniDtype_t kFloat8E5M2FNUZ = static_cast<infiniDtype_t>(kFloat8E5M2 + 1);
constexpr infiniDtype_t kFloat8E4M3FN = static_cast<infiniDtype_t>(kFloat8E5M2 + 2);
constexpr infiniDtype_t kFloat8E4M3FNUZ = static_cast<infiniDtype_t>(kFloat8E5M2 + 3);

constexpr const char *name_of(infiniDtype_t dtype) {
    return static_cast<unsigned>(dtype) < kDtypeCount ? kDtypes[dtype].name
           : dtype == kFloat8E5M2                     ? "float8_e5m2"
           : dtype == kFloat8E5M2FNUZ                 ? "float8_e5m2fnuz"
           : dtype == kFloat8E4M3FN                   ? "float8_e4m3fn"
           : dtype == kFloat8E4M3FNUZ                 ? "float8_e4m3fnuz"
                                                      : "unknown";
}

constexpr bool is_half(infiniDtype_t dtype) {
    return dtype == INFINI_DTYPE_F16 || dtype == INFINI_DTYPE_BF16;
}

} // namespace infini
