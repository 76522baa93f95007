/* Two processes add their numbers up, through libinfiniccl; each prints the sums and the mean.
 *   R=$(python -m torch_infini root)
 *   cc -std=c99 -Wall csrc/example/all_reduce.c -I$R/include -L$R/lib -linfiniccl -linfinirt -Wl,-rpath,$R/lib &&
 * ./a.out */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "infiniccl.h"

#define RANKS 2
#define COUNT 4
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        if ((call) != INFINI_STATUS_SUCCESS) {                                                                         \
            fprintf(stderr, "%s\n", infiniGetLastErrorMessage());                                                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void work(const infinicclUniqueId_t *id, int rank) {
    float x[COUNT], sums[COUNT], mean = (float)rank;
    for (int i = 0; i < COUNT; ++i) {
        x[i] = (float)(i * (rank + 1));
    }
    infinicclComm_t comm;
    CHECK(infinicclCommInitRank(INFINI_DEVICE_CPU, &comm, RANKS, id, rank, 0, 0));
    CHECK(infinicclAllReduce(x, sums, COUNT, INFINI_DTYPE_F32, INFINICCL_SUM, comm, NULL));
    CHECK(infinicclAllReduce(&mean, &mean, 1, INFINI_DTYPE_F32, INFINICCL_AVG, comm, NULL)); /* in place */
    CHECK(infinicclCommDestroy(comm));
    printf("%g %g %g %g, %g\n", sums[0], sums[1], sums[2], sums[3], mean);
}

int main(void) {
    infinicclUniqueId_t id; /* how it gets to the others is the program's affair: here they inherit it */
    CHECK(infinicclGetUniqueId(INFINI_DEVICE_CPU, &id));
    for (int rank = 0; rank < RANKS; ++rank) {
        const pid_t child = fork();
        if (child < 0) {
            perror("fork");
            return 1;
        }
        if (child == 0) {
            work(&id, rank);
            return 0;
        }
    }
    int failed = 0, status;
    for (int rank = 0; rank < RANKS; ++rank) {
        wait(&status);
        failed |= status;
    }
    return failed != 0;
}
