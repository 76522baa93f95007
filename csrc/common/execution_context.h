// ExecutionContext: where one call of an op computes: on which device, on which stream. Whoever calls an op makes one,
// the C ABI and the torch binding among others; run() passes it to the kernel.
#pragma once

#include "infinicore.h"

namespace infini {

struct TensorView;
namespace gemm {
struct Args;
}

struct ExecutionContext {
    infiniDevice_t device_type = INFINI_DEVICE_CPU;
    int device_id = 0;
    void *stream =
        nullptr; // the driver's own (CUDA: a cudaStream_t); none on the CPU, where a kernel is done on return

    // A library for dense products that the caller brings, or nullptr: gemm/library.h.
    void (*library)(const gemm::Args &, const TensorView &bias) = nullptr;

    // Whether the host reads the tensors' memory. There an op checks ids, lengths and slots before its kernel trusts
    // them; on other devices the kernel judges them.
    bool is_cpu() const { return device_type == INFINI_DEVICE_CPU; }
};

// "cpu", "nvidia", ...; the type is one of infiniDevice_t's.
constexpr const char *name_of(infiniDevice_t type) {
    constexpr const char *names[INFINI_DEVICE_TYPE_COUNT] = {"cpu",   "nvidia",   "cambricon", "ascend", "metax",
                                                             "moore", "iluvatar", "kunlun",    "hygon",  "qy"};
    return names[type];
}

} // namespace infini
