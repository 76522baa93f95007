// Device `infini`, PyTorch's PrivateUse1: what its sources share. A storage of infini owns a *twin*, a storage of the
// backing device (CPU or CUDA) on the same memory; ops run on tensors of twins, so no byte is copied. Compiled against
// torch's C++ API, for one release of it: only csrc/device does so, the other libraries use the stable ABI.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/library.h>

#include "infinirt.h"

namespace infini::device {

constexpr c10::DeviceType kInfini = c10::DeviceType::PrivateUse1;

// The device below: its type, and what tensors and results of it are dispatched by. Set once, by start().
struct Backing {
    c10::DeviceType type = c10::DeviceType::CPU;
    c10::DispatchKey key = c10::DispatchKey::CPU;
    bool started = false;
    // A device of infinirt that a vendor has brought, whose memory the host can use: twins are tensors of the CPU in it,
    // and ops of torch.ops.infini run its kernels where it has them. CPU: there is none.
    infiniDevice_t vendor = INFINI_DEVICE_CPU;
    void (*compute_on)(infiniDevice_t, bool, void (*)(const char *)) = nullptr; // infiniTorchComputeOn, of csrc/torch

    bool is_vendors() const { return vendor != INFINI_DEVICE_CPU; }
};
extern Backing backing;

// Number of infini devices: those of the backing device.
c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_index();
// The index of an infini device, -1 being the current one. Throws for one that does not exist.
c10::DeviceIndex checked_index(c10::Device device);
inline c10::Device below(c10::DeviceIndex index) {
    return backing.type == c10::kCPU ? c10::Device(c10::kCPU) : c10::Device(backing.type, index);
}

// ---- storage.cpp: twins ----

// The twin of an infini storage; one that torch made around foreign memory gets its twin here.
c10::StorageImpl *twin_of(c10::StorageImpl *storage);
// A DataPtr of infini that owns the twin. `counted`: whether its bytes stand in the statistics of the allocator.
c10::DataPtr owning(c10::intrusive_ptr<c10::StorageImpl> twin, c10::DeviceIndex index, bool counted);
// A new infini storage around a storage of the backing device.
c10::intrusive_ptr<c10::StorageImpl> storage_around(c10::intrusive_ptr<c10::StorageImpl> twin, bool counted);
// Gives the infini storage the address and the size that its twin has now.
void follow_twin(c10::StorageImpl *storage, c10::StorageImpl *twin);
// Resizes a storage; its content stays, as far as there is room.
void resize_storage(c10::StorageImpl *storage, size_t bytes);

// A tensor of the backing device on the memory of an infini tensor. A plain one has no autograd keys and no version
// counter: for kernels that are called below autograd.
at::Tensor to_twin(const at::Tensor &tensor);
at::Tensor to_plain_twin(const at::Tensor &tensor);
// The reverse: a view of an infini tensor, and a tensor on a storage of infini.
at::Tensor from_view(const at::Tensor &tensor, const at::Tensor &base);
at::Tensor from_twin(const at::Tensor &tensor, c10::intrusive_ptr<c10::StorageImpl> storage);
// An infini tensor of a result: a new storage around the result's.
at::Tensor from_result(const at::Tensor &tensor);
// The tensor on the backing device that users see, and the infini tensor on one of theirs: neither memory can be
// resized any more, for the other would not learn of it.
at::Tensor unwrap(const at::Tensor &tensor);
at::Tensor wrap(const at::Tensor &tensor);

// ---- allocator.cpp ----

void count_added(c10::DeviceIndex index, size_t bytes);
void count_removed(c10::DeviceIndex index, size_t bytes);
c10::DeviceAllocator *device_allocator();
at::Allocator *pinned_allocator();
bool is_pinned(const void *pointer);
void register_allocators();
// Throws OutOfMemoryError with the bytes that were asked for and those that are free.
[[noreturn]] void out_of_memory(const std::string &cause, int64_t asked);

// ---- vendor.cpp: memory of a vendor's device ----

// While one exists, this thread makes tensors of the CPU in the vendor's memory, if there is a vendor.
class InVendorMemory {
public:
    InVendorMemory();
    ~InVendorMemory();
    InVendorMemory(const InVendorMemory &) = delete;
    InVendorMemory &operator=(const InVendorMemory &) = delete;

private:
    bool before_;
};
// Makes torch's allocator of the CPU one that knows the vendor's memory as well.
void register_vendor_memory();
bool is_vendor_memory(const c10::StorageImpl *storage);

// ---- guard.cpp, generator.cpp, hooks.cpp, profiler.cpp ----

void register_guard();
const at::Generator &default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The backing device's generator within an infini generator; the default one's where none is given.
at::Generator generator_below(const std::optional<at::Generator> &generator);
void register_hooks();
void register_profiler();
// Throws in a child of fork() whose parent has used a backing GPU.
void check_fork();

// ---- swap.cpp: every op of the backing device ----

enum class FallbackMode { allow = 0, warn = 1, error = 2 };
void set_fallback_mode(FallbackMode mode);
FallbackMode fallback_mode();
// How often each op of another library than infini ran on the twins; reset by `clear`.
std::vector<std::pair<std::string, int64_t>> fallback_counts(bool clear);
void register_fallbacks();

// ---- layouts.cpp: tensors that infini does not have ----

void register_layouts();

// ---- kernels.cpp, overrideable.cpp, autocast.cpp: ops that have code of their own ----

// Names of aten ops (with overload) that kernels.cpp and overrideable.cpp implement.
bool has_own_kernel(const c10::OperatorName &name);
void register_kernels();
void register_overrideable();
void register_autocast();

} // namespace infini::device
