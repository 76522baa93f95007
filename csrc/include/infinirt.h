/* libinfinirt: what the libraries know of the machine they run on. C99 and C++17.
 * So far: the CPU's instruction sets and the last error; devices, streams, events, memory and graphs are to follow.
 * Functions that can fail return an infiniStatus_t and leave a sentence for infiniGetLastErrorMessage(). */
#ifndef INFINIRT_H
#define INFINIRT_H

#include "infinicore.h"

#define INFINI_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* What the last call that failed on this thread has to say; "" if none did. Valid until the next failure. */
INFINI_API const char *infiniGetLastErrorMessage(void);

/* The instruction set that the CPU kernels use now: "baseline", "avx2", "avx512" or "avx512_bf16"; NULL on error. */
INFINI_API const char *infinirtCpuCapability(void);

/* The highest one that this machine and this build have. */
INFINI_API const char *infinirtCpuHighestCapability(void);

/* Choose one, at most the highest. BAD_PARAM for an unknown name or one out of reach. For tests and measurements. */
INFINI_API infiniStatus_t infinirtCpuSetCapability(const char *name);

#ifdef __cplusplus
}
#endif

#endif /* INFINIRT_H */
