// The part of NCCL that is used here: its functions, looked up in the library at the first use, and its enum values,
// which are its ABI (https://docs.nvidia.com/deeplearning/nccl). No NCCL header is needed to build.
#pragma once

#include <cstddef>

#include "infiniccl.h"

namespace infini::ccl::nccl {

using Result = int;
constexpr Result kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5;

using DataType = int;
constexpr DataType kInt8 = 0, kUint8 = 1, kInt32 = 2, kUint32 = 3, kInt64 = 4, kUint64 = 5, kFloat16 = 6, kFloat32 = 7,
                   kFloat64 = 8, kBfloat16 = 9;

using RedOp = int; // the values of infinicclReduceOp_t
constexpr RedOp kMax = 2, kMin = 3;
static_assert(INFINICCL_SUM == 0 && INFINICCL_PROD == 1 && INFINICCL_MAX == kMax && INFINICCL_MIN == kMin &&
              INFINICCL_AVG == 4);

using UniqueId = infinicclUniqueId_t; // 128 bytes too; passed by value
using Comm = void *;
using Stream = void *; // cudaStream_t

#define INFINI_NCCL_FUNCTIONS(F)                                                                                       \
    F(Result, GetUniqueId, (UniqueId *))                                                                               \
    F(Result, CommInitRank, (Comm *, int ranks, UniqueId, int rank))                                                   \
    F(Result, CommInitAll, (Comm *, int devices, const int *device_ids))                                               \
    F(Result, CommDestroy, (Comm))                                                                                     \
    F(Result, CommAbort, (Comm))                                                                                       \
    F(const char *, GetErrorString, (Result))                                                                          \
    F(Result, AllReduce, (const void *, void *, size_t count, DataType, RedOp, Comm, Stream))                          \
    F(Result, Broadcast, (const void *, void *, size_t count, DataType, int root, Comm, Stream))                       \
    F(Result, AllGather, (const void *, void *, size_t count, DataType, Comm, Stream))                                 \
    F(Result, ReduceScatter, (const void *, void *, size_t count, DataType, RedOp, Comm, Stream))                      \
    F(Result, Send, (const void *, size_t count, DataType, int peer, Comm, Stream))                                    \
    F(Result, Recv, (void *, size_t count, DataType, int peer, Comm, Stream))

struct Functions {
#define INFINI_NCCL_POINTER(Type, Name, arguments) Type(*Name) arguments = nullptr;
    INFINI_NCCL_FUNCTIONS(INFINI_NCCL_POINTER)
#undef INFINI_NCCL_POINTER
};

} // namespace infini::ccl::nccl
