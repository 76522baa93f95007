/* The types every library of the stack shares: status codes, device types and element types.
 * Valid as C99 and C++17; the values are the ABI of InfiniCore (January 2026) and never change.
 * The libraries' functions are declared in infinirt.h, infiniop.h and infiniccl.h. */
#ifndef INFINICORE_H
#define INFINICORE_H

#include <stddef.h>
#include <stdint.h>

#define INFINI_API __attribute__((visibility("default")))

/* For functions that a caller's own library exports: __C __export infiniStatus_t engine_step(void).
 * The compilers' headers of vector instructions have parameters called __C, so they come first. */
#if defined(__x86_64__) && !defined(__CUDACC__)
#include <x86intrin.h>
#endif
#ifndef __C
#ifdef __cplusplus
#define __C extern "C"
#else
#define __C
#endif
#endif
#ifndef __export
#define __export __attribute__((visibility("default")))
#endif

/* Enum parameters take any int in C++ as well, so that functions can reject values out of range. */
#ifdef __cplusplus
#define INFINI_ENUM_BASE : int
#else
#define INFINI_ENUM_BASE
#endif

/* The result of a function of the C ABI. With any value but SUCCESS its arguments are unchanged. */
typedef enum INFINI_ENUM_BASE {
    INFINI_STATUS_SUCCESS = 0,
    INFINI_STATUS_INTERNAL_ERROR = 1,
    INFINI_STATUS_NOT_IMPLEMENTED = 2,
    INFINI_STATUS_BAD_PARAM = 3,
    INFINI_STATUS_NULL_POINTER = 4,
    INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED = 5,
    INFINI_STATUS_DEVICE_NOT_FOUND = 6,
    INFINI_STATUS_DEVICE_NOT_INITIALIZED = 7,
    INFINI_STATUS_DEVICE_ARCHITECTURE_NOT_SUPPORTED = 8,
    INFINI_STATUS_BAD_TENSOR_DTYPE = 10,
    INFINI_STATUS_BAD_TENSOR_SHAPE = 11,
    INFINI_STATUS_BAD_TENSOR_STRIDES = 12,
    INFINI_STATUS_INSUFFICIENT_WORKSPACE = 13
} infiniStatus_t;

typedef enum INFINI_ENUM_BASE {
    INFINI_DEVICE_CPU = 0,
    INFINI_DEVICE_NVIDIA = 1,
    INFINI_DEVICE_CAMBRICON = 2,
    INFINI_DEVICE_ASCEND = 3,
    INFINI_DEVICE_METAX = 4,
    INFINI_DEVICE_MOORE = 5,
    INFINI_DEVICE_ILUVATAR = 6,
    INFINI_DEVICE_KUNLUN = 7,
    INFINI_DEVICE_HYGON = 8,
    INFINI_DEVICE_QY = 9,
    INFINI_DEVICE_TYPE_COUNT = 10
} infiniDevice_t;

/* Element types. F16 is IEEE binary16, BF16 the upper half of binary32, C* are complex (real, imaginary). */
typedef enum INFINI_ENUM_BASE {
    INFINI_DTYPE_INVALID = 0,
    INFINI_DTYPE_BYTE = 1,
    INFINI_DTYPE_BOOL = 2,
    INFINI_DTYPE_I8 = 3,
    INFINI_DTYPE_I16 = 4,
    INFINI_DTYPE_I32 = 5,
    INFINI_DTYPE_I64 = 6,
    INFINI_DTYPE_U8 = 7,
    INFINI_DTYPE_U16 = 8,
    INFINI_DTYPE_U32 = 9,
    INFINI_DTYPE_U64 = 10,
    INFINI_DTYPE_F8 = 11,
    INFINI_DTYPE_F16 = 12,
    INFINI_DTYPE_F32 = 13,
    INFINI_DTYPE_F64 = 14,
    INFINI_DTYPE_C16 = 15,
    INFINI_DTYPE_C32 = 16,
    INFINI_DTYPE_C64 = 17,
    INFINI_DTYPE_C128 = 18,
    INFINI_DTYPE_BF16 = 19
} infiniDtype_t;

#endif /* INFINICORE_H */
