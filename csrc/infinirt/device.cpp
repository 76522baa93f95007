// TEMPORARY until the runtime is merged.
#include "infinirt.h"
infiniStatus_t infinirtGetDevice(infiniDevice_t *d, int *i) {
    if (d)
        *d = INFINI_DEVICE_CPU;
    if (i)
        *i = 0;
    return INFINI_STATUS_SUCCESS;
}
infiniStatus_t infinirtStreamLaunchHostFunction(infinirtStream_t, infinirtHostFunction_t, void *, void (*)(void *)) {
    return INFINI_STATUS_NOT_IMPLEMENTED;
}
