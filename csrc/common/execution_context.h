// ExecutionContext: the device and stream of one call of an op. The caller makes it, for example the C ABI or the torch
// binding; run() passes it to the kernel.
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

    // The caller's function that computes dense products by a library, or nullptr (gemm/library.h).
    void (*library)(const gemm::Args &, const TensorView &bias) = nullptr;

    // Whether the host can read the tensors' memory. If so, ids, lengths and slots are checked before the kernel runs;
    // on other devices the kernel checks them.
    bool is_cpu() const { return device_type == INFINI_DEVICE_CPU; }
};

// The device type's name in messages: "cpu", "nvidia", ... `type` must be valid.
constexpr const char *name_of(infiniDevice_t type) {
    constexpr const char *names[INFINI_DEVICE_TYPE_COUNT] = {"cpu",   "nvidia",   "cambricon", "ascend", "metax",
                                                             "moore", "iluvatar", "kunlun",    "hygon",  "qy"};
    return names[type];
}

} // namespace infini
