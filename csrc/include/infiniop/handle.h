/* Handles: a device that operators are created for. */
#ifndef INFINIOP_HANDLE_H
#define INFINIOP_HANDLE_H

#include "../infinirt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Read-only for callers. */
struct InfiniopHandle {
    infiniDevice_t device;
    int device_id;
};

typedef struct InfiniopHandle *infiniopHandle_t;

/* A handle of the calling thread's current device (infinirtSetDevice). It belongs to the caller until destroyed; the
 * descriptors made with it do not need it any more. */
INFINI_API infiniStatus_t infiniopCreateHandle(infiniopHandle_t *handle_ptr);

/* BAD_PARAM for a handle that was destroyed already or never made. */
INFINI_API infiniStatus_t infiniopDestroyHandle(infiniopHandle_t handle);

#ifdef __cplusplus
}
#endif

#endif /* INFINIOP_HANDLE_H */
