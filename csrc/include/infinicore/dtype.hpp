// DataType: the element types of tensors, with the values of infiniDtype_t; their names and sizes.
#pragma once

#include <cstddef>
#include <string>

#include "../infinicore.h"

namespace infinicore {

enum class DataType {
    BYTE = INFINI_DTYPE_BYTE,
    BOOL = INFINI_DTYPE_BOOL,
    I8 = INFINI_DTYPE_I8,
    I16 = INFINI_DTYPE_I16,
    I32 = INFINI_DTYPE_I32,
    I64 = INFINI_DTYPE_I64,
    U8 = INFINI_DTYPE_U8,
    U16 = INFINI_DTYPE_U16,
    U32 = INFINI_DTYPE_U32,
    U64 = INFINI_DTYPE_U64,
    F8 = INFINI_DTYPE_F8,
    F16 = INFINI_DTYPE_F16,
    F32 = INFINI_DTYPE_F32,
    F64 = INFINI_DTYPE_F64,
    C16 = INFINI_DTYPE_C16,
    C32 = INFINI_DTYPE_C32,
    C64 = INFINI_DTYPE_C64,
    C128 = INFINI_DTYPE_C128,
    BF16 = INFINI_DTYPE_BF16,
    // The long names, which InfiniCore's documents also use.
    INT8 = I8,
    INT16 = I16,
    INT32 = I32,
    INT64 = I64,
    UINT8 = U8,
    UINT16 = U16,
    UINT32 = U32,
    UINT64 = U64,
    FLOAT8 = F8,
    FLOAT16 = F16,
    FLOAT32 = F32,
    FLOAT64 = F64,
    BFLOAT16 = BF16,
    COMPLEX16 = C16,
    COMPLEX32 = C32,
    COMPLEX64 = C64,
    COMPLEX128 = C128
};

std::string toString(const DataType &dtype); // "bfloat16"

// Bytes of one element.
size_t dsize(const DataType &dtype);

} // namespace infinicore
