/* libinfinirt: devices, streams, events, memory and graphs of every backend, behind one set of functions. C99 and
 * C++17. A function that fails returns its status, leaves its arguments as they were, and keeps a message for
 * infiniGetLastErrorMessage(). Any thread may call any function; the current device belongs to the calling thread.
 * A child of fork() has none of its parent's threads and must not use its parent's handles and memory. */
#ifndef INFINIRT_H
#define INFINIRT_H

#include "infinicore.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Handles. Each is made by a Create (or Instantiate, or EndCapture) and belongs to the caller until its Destroy. A
 * handle that was never made, or was destroyed (until a new one gets its address), is BAD_PARAM; NULL is NULL_POINTER,
 * except for streams. A handle works on the device that it was made on, whichever is current.
 *
 * A stream is a queue: its work runs in the order it was queued; streams run independently of one another.
 * A NULL stream means: done on return, on the current device. It does not wait for work queued on streams.
 * A stream of an NVIDIA device is a cudaStream_t, made with cudaStreamNonBlocking.
 * A stream of the CPU is immediate or queued. On an immediate one, the default, work is done by the calling thread when
 * the call returns, which reports its failure; calls that several threads make at once are not ordered. A queued one
 * has a thread that does the work; it holds at most 1024 pending calls, and further calls wait (but not in a host
 * function that a queued stream runs). INFINIRT_STREAM_QUEUED makes one; with the environment variable
 * INFINI_CPU_STREAMS=queued (or immediate) infinirtStreamCreate() does. Captured work runs at replay on either.
 *
 * On NVIDIA devices the host cannot read or write device memory; a failure of queued work persists: every later call
 * that touches the device fails with it. */
typedef void *infinirtStream_t;
typedef void *infinirtEvent_t;
typedef void *infinirtGraph_t;
typedef void *infinirtGraphNode_t;
typedef void *infinirtGraphExec_t;

/* ---- devices ---- */

/* Prepares the backends of this build. Other functions do so themselves; calling it again does no harm. */
INFINI_API infiniStatus_t infinirtInit(void);

/* Writes the number of devices of each type to count_array[INFINI_DEVICE_TYPE_COUNT]: 1 CPU; 0 for absent types. */
INFINI_API infiniStatus_t infinirtGetAllDeviceCount(int *count_array);

/* Writes the number of devices of one type; 0 for a type that this build has no backend for.
 * DEVICE_TYPE_NOT_SUPPORTED for a value that is not a device type. */
INFINI_API infiniStatus_t infinirtGetDeviceCount(infiniDevice_t device, int *count);

/* Writes 1 if the host reads and writes the device's memory by its address (the CPU's own, and unified memory), 0 if it
 * needs copies. DEVICE_TYPE_NOT_SUPPORTED and DEVICE_NOT_FOUND as infinirtSetDevice. */
INFINI_API infiniStatus_t infinirtIsHostAccessible(infiniDevice_t device, int device_id, int *is_accessible);

/* Makes a device the calling thread's current one; a thread starts with CPU 0. A failure changes nothing:
 * DEVICE_TYPE_NOT_SUPPORTED without a backend for it in this build, DEVICE_NOT_FOUND for a device_id out of range. */
INFINI_API infiniStatus_t infinirtSetDevice(infiniDevice_t device, int device_id);

/* The calling thread's current device. Either pointer may be NULL. */
INFINI_API infiniStatus_t infinirtGetDevice(infiniDevice_t *device_ptr, int *device_id_ptr);

/* Returns when all work queued on the current device is done, with the status of the first failure on any stream since
 * that stream's last synchronisation. Work that is being captured is not queued; on NVIDIA devices BAD_PARAM while a
 * stream of the device is captured. */
INFINI_API infiniStatus_t infinirtDeviceSynchronize(void);

/* ---- streams (of the current device) ---- */

typedef enum INFINI_ENUM_BASE {
    INFINIRT_STREAM_DEFAULT = 0,
    INFINIRT_STREAM_QUEUED = 1 /* on the CPU, queued instead of immediate; streams of other devices always are */
} infinirtStreamFlags_t;

/* BAD_PARAM if INFINI_CPU_STREAMS is neither queued nor immediate. */
INFINI_API infiniStatus_t infinirtStreamCreate(infinirtStream_t *stream_ptr);

/* `flags`: an or of infinirtStreamFlags_t; BAD_PARAM for other bits. INTERNAL_ERROR if the system has no more threads
 * for a queued stream. (An addition to the Infini interface.) */
INFINI_API infiniStatus_t infinirtStreamCreateWithFlags(infinirtStream_t *stream_ptr, uint32_t flags);

/* Registers a stream that the caller has created with the driver (a cudaStream_t, also torch's) as one of the current
 * device: *stream_ptr is `native` itself, which the functions below accept from then on. It stays the caller's:
 * infinirtStreamDestroy() only unregisters it, once for each registration, and waits for nothing. Unregister a stream
 * before its owner destroys it. BAD_PARAM for a stream of infinirtStreamCreate(), or of another device;
 * NOT_IMPLEMENTED on the CPU. Pass CUDA's default stream as cudaStreamLegacy, since NULL is NULL_POINTER. (An addition
 * to the Infini interface.) */
INFINI_API infiniStatus_t infinirtStreamFromNative(infinirtStream_t *stream_ptr, void *native);

/* Waits for the queued work, then frees the stream. NULL_POINTER for NULL. A capture that began on it is lost, and so
 * is a failure that no synchronisation has reported. Threads that wait for the stream still return.
 * On NVIDIA devices, destroying a stream that joined a capture loses that capture. */
INFINI_API infiniStatus_t infinirtStreamDestroy(infinirtStream_t stream);

/* Returns when all work queued before is done, with the status of the first failure since the last synchronisation (its
 * message becomes the last error). Work after the failure has still run. BAD_PARAM while the stream is captured; a NULL
 * stream has nothing to wait for. */
INFINI_API infiniStatus_t infinirtStreamSynchronize(infinirtStream_t stream);

/* Work queued on `stream` from now on waits for the last infinirtEventRecord() of `event` before this call; an event
 * that was never recorded delays nothing. With a NULL or an immediate stream the call itself waits. If that record is
 * part of a capture, the stream joins the capture; a captured stream can wait for no other event. BAD_PARAM otherwise,
 * or after that capture's end. */
INFINI_API infiniStatus_t infinirtStreamWaitEvent(infinirtStream_t stream, infinirtEvent_t event);

/* Queues function(data), which runs on a thread of the stream with the caller's omp_get_max_threads(). A status other
 * than SUCCESS is the stream's failure, with the message that the function gave to infinirtSetLastErrorMessage().
 * With a NULL or an immediate stream it has run on return, and its status is returned.
 *
 * `data` must stay valid until release(data) is called: once, by any thread, when the function will not run again. That
 * is after it ran or, if it was captured, when the capture, its graph, the graph's instances and their queued launches
 * are all gone. release may be NULL. If this call fails, release is not called and `data` stays the caller's.
 *
 * On a queued stream, neither function nor release may call infinirt functions that wait (BAD_PARAM, except for
 * infinirtFree()).
 * Only for streams of the CPU: NOT_IMPLEMENTED for others. */
typedef infiniStatus_t (*infinirtHostFunction_t)(void *data);
INFINI_API infiniStatus_t infinirtStreamLaunchHostFunction(infinirtStream_t stream, infinirtHostFunction_t function,
                                                           void *data, void (*release)(void *data));

/* For libraries that queue kernels themselves, as libinfiniop does: calls enqueue(native, data) once, on this thread,
 * with the device current in its driver meanwhile, and returns its status. `native` is the driver's stream: `stream`
 * itself, which need not be registered here; if that is NULL, a stream whose work is done when this call returns. The
 * device need not be the current one. NOT_IMPLEMENTED on the CPU. (An addition to the Infini interface.) */
typedef infiniStatus_t (*infinirtEnqueue_t)(void *native, void *data);
INFINI_API infiniStatus_t infinirtStreamEnqueue(infiniDevice_t device, int device_id, infinirtStream_t stream,
                                                infinirtEnqueue_t enqueue, void *data);

/* ---- events (of the current device) ---- */

typedef enum INFINI_ENUM_BASE { INFINIRT_EVENT_COMPLETE = 0, INFINIRT_EVENT_NOT_READY = 1 } infinirtEventStatus_t;

typedef enum INFINI_ENUM_BASE {
    INFINIRT_EVENT_DEFAULT = 0,
    INFINIRT_EVENT_DISABLE_TIMING = 1, /* the event cannot be used with infinirtEventElapsedTime() */
    INFINIRT_EVENT_BLOCKING_SYNC = 2   /* a thread that waits sleeps instead of spinning (on the CPU it always does) */
} infinirtEventFlags_t;

INFINI_API infiniStatus_t infinirtEventCreate(infinirtEvent_t *event_ptr);

/* `flags`: an or of infinirtEventFlags_t; BAD_PARAM for other bits. */
INFINI_API infiniStatus_t infinirtEventCreateWithFlags(infinirtEvent_t *event_ptr, uint32_t flags);

/* Queues the event on the stream: it is complete when all work queued before is. Recording it again replaces the
 * earlier record; streams and threads that already wait for that one are not affected. Event and stream must be of one
 * device.
 * On a captured stream the record is only part of the capture: replays do not complete the event, and until it is
 * recorded again, Query, Synchronize and ElapsedTime return BAD_PARAM. */
INFINI_API infiniStatus_t infinirtEventRecord(infinirtEvent_t event, infinirtStream_t stream);

/* Whether the last record is complete; an event that was never recorded is. Does not wait. */
INFINI_API infiniStatus_t infinirtEventQuery(infinirtEvent_t event, infinirtEventStatus_t *status_ptr);

/* Returns when the last record is complete. */
INFINI_API infiniStatus_t infinirtEventSynchronize(infinirtEvent_t event);

/* Frees the event at once; streams and threads that wait for its last record are not affected. */
INFINI_API infiniStatus_t infinirtEventDestroy(infinirtEvent_t event);

/* Milliseconds between the completions of two records, measured to better than a microsecond; negative where `end` was
 * first. BAD_PARAM if either event was never recorded, is not complete, or has DISABLE_TIMING. */
INFINI_API infiniStatus_t infinirtEventElapsedTime(float *ms_ptr, infinirtEvent_t start, infinirtEvent_t end);

/* ---- memory (of the current device, and of its host) ---- */

/* `size` bytes of device memory, aligned to at least 64; 0 bytes give NULL. INTERNAL_ERROR if there is not enough.
 * To be freed with infinirtFree() or infinirtFreeAsync(), while the same device is current or by a stream of it. */
INFINI_API infiniStatus_t infinirtMalloc(void **p_ptr, size_t size);

/* The same of pinned host memory, which the device copies faster; to be freed with infinirtFreeHost() anywhere. */
INFINI_API infiniStatus_t infinirtMallocHost(void **p_ptr, size_t size);

/* Waits for the device's queued work, then frees; in a host function that a stream runs, frees without waiting.
 * Failures of that work stay for the next synchronisation. NULL does nothing. BAD_PARAM for memory that
 * infinirtMalloc() (infinirtMallocHost()) did not give, that was freed already, or for an address inside of an
 * allocation; on NVIDIA devices also while a stream of the device is captured. On the CPU both are host memory, which
 * either function frees. */
INFINI_API infiniStatus_t infinirtFree(void *ptr);
INFINI_API infiniStatus_t infinirtFreeHost(void *ptr);

typedef enum INFINI_ENUM_BASE {
    INFINIRT_MEMCPY_H2H = 0,
    INFINIRT_MEMCPY_H2D = 1,
    INFINIRT_MEMCPY_D2H = 2,
    INFINIRT_MEMCPY_D2D = 3
} infinirtMemcpyKind_t;

/* Copies `size` bytes; done on return. It waits for no stream. The ranges may overlap. BAD_PARAM for an invalid kind,
 * and for a range that begins inside an allocation of infinirt and reaches beyond its end; other memory is not checked.
 * NULL_POINTER for NULL if size is not 0. */
INFINI_API infiniStatus_t infinirtMemcpy(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind);

/* The same, queued on the stream; both ranges must stay valid until it is done. */
INFINI_API infiniStatus_t infinirtMemcpyAsync(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind,
                                              infinirtStream_t stream);

/* Device memory for work that is queued on the stream from now on. Not while the stream is captured
 * (NOT_IMPLEMENTED). With a NULL stream the same as infinirtMalloc(). */
INFINI_API infiniStatus_t infinirtMallocAsync(void **p_ptr, size_t size, infinirtStream_t stream);

/* Frees when all work queued on the stream before is done; the address is refused from now on. Not while the stream is
 * captured (NOT_IMPLEMENTED). With a NULL stream the same as infinirtFree(). On NVIDIA devices memory of
 * infinirtMalloc() is waited for; that of infinirtMallocAsync() is not. */
INFINI_API infiniStatus_t infinirtFreeAsync(void *ptr, infinirtStream_t stream);

/* ---- graphs: work captured from streams once and replayed any number of times ---- */

/* Which calls a capture forbids on devices where they would disturb it; the CPU forbids none. On NVIDIA devices these
 * are infinirtMalloc(), infinirtMallocHost(), and waiting for or asking about streams and events outside of the
 * capture: GLOBAL forbids them to all threads, THREAD_LOCAL to the one that began the capture, RELAXED to none. They
 * give BAD_PARAM, and the capture is lost: its end says so. */
typedef enum INFINI_ENUM_BASE {
    INFINIRT_STREAM_CAPTURE_MODE_GLOBAL = 0,
    INFINIRT_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    INFINIRT_STREAM_CAPTURE_MODE_RELAXED = 2
} infinirtStreamCaptureMode_t;

/* From now on, work queued on the stream is recorded instead of run. A stream that waits for an event recorded on a
 * captured one joins the capture. While captured, a stream cannot be synchronised. BAD_PARAM for NULL, which is not a
 * queue, and for a stream that is already captured. */
INFINI_API infiniStatus_t infinirtStreamBeginCapture(infinirtStream_t stream, infinirtStreamCaptureMode_t mode);

/* Ends the capture where it began; the graph belongs to the caller. BAD_PARAM on a stream where none began. Streams
 * that joined leave the capture; what they queued is in it. On NVIDIA devices the first stream must wait for them
 * before (BAD_PARAM, and the capture is lost), and unless the mode is RELAXED the thread must be the one that began. */
INFINI_API infiniStatus_t infinirtStreamEndCapture(infinirtStream_t stream, infinirtGraph_t *graph_ptr);

/* Instances of the graph stay valid. */
INFINI_API infiniStatus_t infinirtGraphDestroy(infinirtGraph_t graph);

/* Makes a graph ready to run. On failure *node_ptr is the node at fault (NULL for no particular node) and
 * log_buffer[buffer_size] says why; on success they are NULL and "". Either pointer may be NULL. */
INFINI_API infiniStatus_t infinirtGraphInstantiate(infinirtGraphExec_t *graph_exec_ptr, infinirtGraph_t graph,
                                                   infinirtGraphNode_t *node_ptr, char *log_buffer, size_t buffer_size);

/* Launches that are already queued still run. */
INFINI_API infiniStatus_t infinirtGraphExecDestroy(infinirtGraphExec_t graph_exec);

/* Queues one run of everything captured, in an order that keeps every dependency; it reads and writes the memory that
 * was captured, which must still be there. On a captured stream the run becomes part of that capture; not on NVIDIA
 * devices, where CUDA launches no graph while it captures: BAD_PARAM, and the capture goes on. (The name is spelled as
 * the stack's users know it.) */
INFINI_API infiniStatus_t infinirtGraphLuanch(infinirtGraphExec_t graph_exec, infinirtStream_t stream);

/* ---- errors, and the CPU's instruction sets (additions to the Infini interface) ---- */

/* The message of the last call that failed on this thread; "" if none did. Valid until the next failure on it. */
INFINI_API const char *infiniGetLastErrorMessage(void);

/* For libraries built on this one: sets that message (a copy of at most 2047 bytes); NULL clears it. */
INFINI_API void infinirtSetLastErrorMessage(const char *message);

/* The instruction set that the CPU kernels use now: "baseline", "avx2", "avx2_vnni", "avx512", "avx512_vnni",
 * "avx512_bf16" or "avx512_amx", on AArch64 "neon", "neon_dotprod", "neon_bf16" or (emulated only) "avx512_amx"; NULL
 * if the environment variable INFINI_CPU_CAPABILITY names none of the list, or INFINI_EMULATE is not "amx". The level
 * is its index in that list; -1 instead of NULL. A machine may lack a level and have a higher one. */
INFINI_API const char *infinirtCpuCapability(void);
INFINI_API int infinirtCpuCapabilityLevel(void);

/* The highest one that this machine and this build have, and whether they have a certain one: 1, 0, or -1 for an
 * unknown name. With INFINI_EMULATE=amx every machine has "avx512_amx", in plain C++, for tests. */
INFINI_API const char *infinirtCpuHighestCapability(void);
INFINI_API int infinirtCpuHasCapability(const char *name);

/* The parts of the level in use: the index of its vector instructions in that list, at most that of "avx512_bf16" or
 * "neon_bf16"; and whether matrices are multiplied in tile registers: 0 no, 1 in those of AMX, 2 in emulated ones. */
INFINI_API int infinirtCpuVectorLevel(void);
INFINI_API int infinirtCpuTiles(void);

/* Why this process has no tile registers: no AMX, an operating system that does not save them, a permission that was
 * refused; or that they are emulated. "" where it has them. */
INFINI_API const char *infinirtCpuTilesRefused(void);

/* Choose one that the machine has. BAD_PARAM for an unknown name or one that it lacks. For tests and measurements. */
INFINI_API infiniStatus_t infinirtCpuSetCapability(const char *name);

#ifdef __cplusplus
}
#endif

#endif /* INFINIRT_H */
