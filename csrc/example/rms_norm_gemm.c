/* One step of a layer in C: rms_norm of two rows, then a product with a weight, through libinfinirt and libinfiniop.
 *   R=$(python -m torch_infini root)
 *   cc -std=c99 -Wall csrc/example/rms_norm_gemm.c -I$R/include -L$R/lib -linfiniop -linfinirt -Wl,-rpath,$R/lib &&
 * ./a.out */
#include <stdio.h>
#include <stdlib.h>

#include "infiniop.h"

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        infiniStatus_t status = (call);                                                                                \
        if (status != INFINI_STATUS_SUCCESS) {                                                                         \
            fprintf(stderr, "status %d: %s\n", (int)status, infiniGetLastErrorMessage());                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A contiguous F32 matrix; rows 0: a vector. */
static infiniopTensorDescriptor_t tensor(size_t rows, size_t columns) {
    infiniopTensorDescriptor_t desc;
    size_t shape[2];
    shape[0] = rows ? rows : columns;
    shape[1] = columns;
    CHECK(infiniopCreateTensorDescriptor(&desc, rows ? 2 : 1, shape, NULL, INFINI_DTYPE_F32));
    return desc;
}

/* Memory of `size` bytes, for an op's workspace; NULL for none. */
static void *allocate(size_t size) {
    void *memory;
    CHECK(infinirtMalloc(&memory, size));
    return memory;
}

int main(void) {
    const float x[2 * 4] = {1, 2, 3, 4, -4, 3, -2, 1};
    const float norm_weight[4] = {1, 1, 1, 2};
    const float weight[4 * 3] = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1};
    float normed[2 * 4], y[2 * 3];
    int row, column;

    infiniopHandle_t handle;
    CHECK(infinirtSetDevice(INFINI_DEVICE_CPU, 0));
    CHECK(infiniopCreateHandle(&handle));

    infiniopTensorDescriptor_t x_desc = tensor(2, 4), norm_weight_desc = tensor(0, 4), weight_desc = tensor(4, 3),
                               y_desc = tensor(2, 3);
    infiniopRMSNormDescriptor_t norm;
    infiniopGemmDescriptor_t gemm;
    CHECK(infiniopCreateRMSNormDescriptor(handle, &norm, x_desc, x_desc, norm_weight_desc, 1e-6f));
    CHECK(infiniopCreateGemmDescriptor(handle, &gemm, y_desc, x_desc, weight_desc));
    /* The operators have copied what they need. */
    CHECK(infiniopDestroyTensorDescriptor(x_desc));
    CHECK(infiniopDestroyTensorDescriptor(norm_weight_desc));
    CHECK(infiniopDestroyTensorDescriptor(weight_desc));
    CHECK(infiniopDestroyTensorDescriptor(y_desc));

    size_t norm_size, gemm_size;
    CHECK(infiniopGetRMSNormWorkspaceSize(norm, &norm_size));
    CHECK(infiniopGetGemmWorkspaceSize(gemm, &gemm_size));
    const size_t size = norm_size > gemm_size ? norm_size : gemm_size;
    void *workspace = allocate(size);

    /* Both run on a stream, in order. On a device, or with INFINI_CPU_STREAMS=queued, this thread goes on meanwhile. */
    infinirtStream_t stream;
    CHECK(infinirtStreamCreate(&stream));
    CHECK(infiniopRMSNorm(norm, workspace, size, normed, x, norm_weight, stream));
    CHECK(infiniopGemm(gemm, workspace, size, y, normed, weight, 1.0f, 0.0f, stream));
    CHECK(infinirtStreamSynchronize(stream));

    for (row = 0; row < 2; ++row) {
        for (column = 0; column < 3; ++column) {
            printf("%9.5f", y[3 * row + column]);
        }
        printf("\n");
    }

    CHECK(infinirtStreamDestroy(stream));
    CHECK(infinirtFree(workspace));
    CHECK(infiniopDestroyGemmDescriptor(gemm));
    CHECK(infiniopDestroyRMSNormDescriptor(norm));
    CHECK(infiniopDestroyHandle(handle));
    return 0;
}
