/* libinfiniccl: collective communication between ranks: threads of one process, processes of one machine, GPUs. C99 and
 * C++17. It is built on libinfinirt: statuses, error messages and streams are those of infinirt.h. Any thread may call
 * any function. */
#ifndef INFINICCL_H
#define INFINICCL_H

#include "infinirt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The reduction over the ranks' elements. On the CPU it is computed in the order of the ranks, rank 0 first, F16 and
 * BF16 in float and rounded once; on NVIDIA devices order and intermediate roundings are NCCL's. AVG is the sum divided
 * by the number of ranks, for floating-point types only. Integers wrap around. MAX and MIN of floating-point numbers
 * are NaN if any of them is. BOOL: SUM and MAX are "any", PROD and MIN "all". */
typedef enum INFINI_ENUM_BASE {
    INFINICCL_SUM = 0,
    INFINICCL_PROD = 1,
    INFINICCL_MAX = 2,
    INFINICCL_MIN = 3,
    INFINICCL_AVG = 4
} infinicclReduceOp_t;

struct InfinicclComm; /* opaque */

/* A communicator, from the view of one rank. It belongs to the caller until infinicclCommDestroy(). */
typedef struct InfinicclComm *infinicclComm_t;

/* An id by which the ranks of a communicator find each other; to be copied to all of them unchanged. */
typedef struct {
    char internal[128];
} infinicclUniqueId_t;

/* ---- communicators ----
 *
 * CPU: the ranks share memory, so that all of them run on one machine; at most 64. NVIDIA: NCCL, loaded when it is
 * first needed, from libnccl.so.2 or what the environment variable INFINI_NCCL_LIBRARY names. Other device types:
 * DEVICE_TYPE_NOT_SUPPORTED.
 *
 * On the CPU every wait for another rank ends after the communicator's timeout, or soon after that rank's process has
 * ended or its communicator was destroyed or aborted: INTERNAL_ERROR with a message that names the rank. The
 * communicator has then failed on all ranks: every call that waits, and every later one, fails with that message. */

/* Makes a communicator of `ndevice` ranks, all in this process, one for each of device_ids[ndevice] of one device type,
 * and writes them to comms[ndevice]. device_ids NULL: 0 .. ndevice - 1. The CPU is one device; every id of at least 0
 * means it, here and below. */
INFINI_API infiniStatus_t infinicclCommInitAll(infiniDevice_t device_type, infinicclComm_t *comms, int ndevice,
                                               const int *device_ids);

/* A new id, for infinicclCommInitRank() on every rank of one communicator. (An addition to the Infini interface, as is
 * everything below except infinicclCommDestroy() and infinicclAllReduce().) */
INFINI_API infiniStatus_t infinicclGetUniqueId(infiniDevice_t device_type, infinicclUniqueId_t *unique_id);

/* Makes this rank's communicator, 0 <= rank < nranks; returns when all ranks have called it with the same id and
 * nranks, each in a process or a thread of its own. An id can be used once.
 * timeout_ms: how long this and every later wait may last; 0: what the environment variable INFINI_CCL_TIMEOUT says
 * (seconds, may be a fraction), else 300 seconds. On NVIDIA devices it is ignored: NCCL's waits have no limit.
 *
 * On the CPU the ranks meet at a file in /dev/shm that is removed when this returns, whether it failed or not; its
 * memory is freed when the last rank ends, even by a signal. INTERNAL_ERROR if /dev/shm is full. */
INFINI_API infiniStatus_t infinicclCommInitRank(infiniDevice_t device_type, infinicclComm_t *comm, int nranks,
                                                const infinicclUniqueId_t *unique_id, int rank, int device_id,
                                                int64_t timeout_ms);

/* How long this rank's waits may last from now on; 0: the default, as above. NOT_IMPLEMENTED on NVIDIA devices. */
INFINI_API infiniStatus_t infinicclCommSetTimeout(infinicclComm_t comm, int64_t timeout_ms);

/* The number of ranks, and the communicator's own. */
INFINI_API infiniStatus_t infinicclCommCount(infinicclComm_t comm, int *count);
INFINI_API infiniStatus_t infinicclCommUserRank(infinicclComm_t comm, int *rank);

/* Fails the communicator on all ranks, so that waiting calls return, on this rank and the others; for programs that
 * cannot continue. The communicator must still be destroyed. */
INFINI_API infiniStatus_t infinicclCommAbort(infinicclComm_t comm);

/* Destroys this rank's communicator; work that is already queued on streams is still done. Ranks that wait for this one
 * from now on fail. Calls in other threads must have returned. */
INFINI_API infiniStatus_t infinicclCommDestroy(infinicclComm_t comm);

/* ---- collectives: to be called once for each rank, by all ranks in the same order ----
 *
 * `stream` is one of infinirt.h, of the communicator's device. With NULL or an immediate stream of the CPU the call is
 * done on return, which needs all ranks: ranks of one process then need a thread each. On a queued stream (on the CPU,
 * INFINIRT_STREAM_QUEUED) the work is queued; a failure is the stream's, for the next synchronisation. One
 * communicator's calls should all be on one stream, or ordered by events.
 *
 * Buffers are memory of the communicator's device, of any alignment; they may be NULL where there are no elements.
 * Apart from what "in place" allows, sendbuf and recvbuf share no memory (BAD_PARAM).
 * Datatypes: reductions take all but F8 and the complex ones (BAD_TENSOR_DTYPE), BYTE as U8; other calls take all.
 * A call without elements still waits for the ranks: on the CPU it is a barrier.
 *
 * CPU: the bits of a result are the same on all ranks, from run to run and whatever the number of elements. Calls that
 * differ among ranks (function, count, datatype, op, root) are found as soon as a rank waits for another: BAD_PARAM
 * with both calls in the message. With INFINI_CCL_CHECK=1 in the environment of rank 0 every call first exchanges its
 * arguments, so that all ranks find a difference before any of them moves an element; values other than 0 and 1 are
 * BAD_PARAM. */

/* recvbuf[i] = the reduction over all ranks of sendbuf[i], for `count` elements. In place: sendbuf is recvbuf. */
INFINI_API infiniStatus_t infinicclAllReduce(void *sendbuf, void *recvbuf, size_t count, infiniDtype_t datatype,
                                             infinicclReduceOp_t op, infinicclComm_t comm, infinirtStream_t stream);

/* recvbuf = rank root's sendbuf, `count` elements, on every rank; other ranks' sendbuf is not read. In place:
 * sendbuf is recvbuf. */
INFINI_API infiniStatus_t infinicclBroadcast(const void *sendbuf, void *recvbuf, size_t count, infiniDtype_t datatype,
                                             int root, infinicclComm_t comm, infinirtStream_t stream);

/* recvbuf[r * sendcount + i] = rank r's sendbuf[i]: recvbuf has nranks * sendcount elements. In place: sendbuf is
 * recvbuf + rank * sendcount. */
INFINI_API infiniStatus_t infinicclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount,
                                             infiniDtype_t datatype, infinicclComm_t comm, infinirtStream_t stream);

/* recvbuf[i] = the reduction over all ranks of sendbuf[rank * recvcount + i]: sendbuf has nranks * recvcount elements.
 * In place: recvbuf is sendbuf + rank * recvcount. */
INFINI_API infiniStatus_t infinicclReduceScatter(const void *sendbuf, void *recvbuf, size_t recvcount,
                                                 infiniDtype_t datatype, infinicclReduceOp_t op, infinicclComm_t comm,
                                                 infinirtStream_t stream);

/* ---- from one rank to another ----
 *
 * Messages from rank a to rank b arrive in the order in which they were sent; a send and its receive have the same
 * count and datatype (BAD_PARAM on the CPU if they differ). peer is another rank. No other ranks take part, and there
 * is no order between these calls and collectives.
 * A send may wait for its receive: if two ranks both send first, use queued streams. */

INFINI_API infiniStatus_t infinicclSend(const void *sendbuf, size_t count, infiniDtype_t datatype, int peer,
                                        infinicclComm_t comm, infinirtStream_t stream);

INFINI_API infiniStatus_t infinicclRecv(void *recvbuf, size_t count, infiniDtype_t datatype, int peer,
                                        infinicclComm_t comm, infinirtStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* INFINICCL_H */
