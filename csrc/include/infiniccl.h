/* libinfiniccl: collective communication between devices. Declared for callers to compile against; the library is not
 * part of this build yet. C99 and C++17. */
#ifndef INFINICCL_H
#define INFINICCL_H

#include "infinirt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum INFINI_ENUM_BASE {
    INFINICCL_SUM = 0,
    INFINICCL_PROD = 1,
    INFINICCL_MAX = 2,
    INFINICCL_MIN = 3,
    INFINICCL_AVG = 4
} infinicclReduceOp_t;

struct InfinicclComm; /* opaque */

typedef struct InfinicclComm *infinicclComm_t;

/* Makes a communicator of `ndevice` ranks, one for each of device_ids[ndevice] (NULL: 0 .. ndevice - 1) of one device
 * type, and writes them to comms[ndevice]; each belongs to the caller until infinicclCommDestroy(). */
INFINI_API infiniStatus_t infinicclCommInitAll(infiniDevice_t device_type, infinicclComm_t *comms, int ndevice,
                                               const int *device_ids);

INFINI_API infiniStatus_t infinicclCommDestroy(infinicclComm_t comm);

/* recvbuf[i] = the reduction over all ranks of sendbuf[i], for `count` elements of `dataype`; to be called once for
 * each rank. sendbuf may be recvbuf. */
INFINI_API infiniStatus_t infinicclAllReduce(void *sendbuf, void *recvbuf, size_t count, infiniDtype_t dataype,
                                             infinicclReduceOp_t op, infinicclComm_t comm, infinirtStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* INFINICCL_H */
