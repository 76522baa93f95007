// Device `infini` (PyTorch's PrivateUse1): declarations shared by its sources. A storage of infini owns a *twin*, a
// storage of the backing device (CPU or CUDA) on the same memory; ops run on tensors of twins, so no byte is copied.
// Compiled against torch's C++ API, for one release of it: only csrc/device does so; the other libraries use the stable
// ABI.
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

// The backing device: its type, and the dispatch keys of its tensors. Set once, by start().
struct Backing {
    c10::DeviceType type = c10::DeviceType::CPU;
    c10::DispatchKey key = c10::DispatchKey::CPU;
    bool started = false;
    // An infinirt device that a vendor has added and whose memory the host can access. Twins are then CPU tensors in
    // its memory, and ops of torch.ops.infini run its kernels if they exist. CPU: no vendor.
    infiniDevice_t vendor = INFINI_DEVICE_CPU;
    void (*compute_on)(infiniDevice_t, bool, void (*)(const char *)) = nullptr; // infiniTorchComputeOn of csrc/torch

    bool is_vendors() const { return vendor != INFINI_DEVICE_CPU; }
};
extern Backing backing;

// The number of infini devices, equal to that of backing devices.
c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_index();
// The index of an infini device; -1 means the current one. Throws if the device does not exist.
c10::DeviceIndex checked_index(c10::Device device);
inline c10::Device below(c10::DeviceIndex index) {
    return backing.type == c10::kCPU ? c10::Device(c10::kCPU) : c10::Device(backing.type, index);
}

// ---- storage.cpp: twins ----

// The twin of an infini storage. A storage that torch made around foreign memory gets its twin here.
c10::StorageImpl *twin_of(c10::StorageImpl *storage);
// A DataPtr of infini that owns the twin. `counted`: whether its bytes are in the allocator's statistics.
c10::DataPtr owning(c10::intrusive_ptr<c10::StorageImpl> twin, c10::DeviceIndex index, bool counted);
// A new infini storage around a storage of the backing device.
c10::intrusive_ptr<c10::StorageImpl> storage_around(c10::intrusive_ptr<c10::StorageImpl> twin, bool counted);
// Updates the infini storage's address and size to those of its twin.
void follow_twin(c10::StorageImpl *storage, c10::StorageImpl *twin);
// Resizes a storage; keeps as much of its content as fits.
void resize_storage(c10::StorageImpl *storage, size_t bytes);

// A tensor of the backing device on the memory of an infini tensor. A plain one has no autograd keys and no version
// counter: for kernels that are called below autograd.
at::Tensor to_twin(const at::Tensor &tensor);
at::Tensor to_plain_twin(const at::Tensor &tensor);
// The opposite direction: a view of an infini tensor, and a tensor on an infini storage.
at::Tensor from_view(const at::Tensor &tensor, const at::Tensor &base);
at::Tensor from_twin(const at::Tensor &tensor, c10::intrusive_ptr<c10::StorageImpl> storage);
// The infini tensor for a result: a new storage around the result's.
at::Tensor from_result(const at::Tensor &tensor);
// unwrap returns the backing device's tensor to users; wrap makes an infini tensor from theirs. Neither memory can be
// resized afterwards, because the other tensor would not know.
at::Tensor unwrap(const at::Tensor &tensor);
at::Tensor wrap(const at::Tensor &tensor);

// ---- allocator.cpp ----

void count_added(c10::DeviceIndex index, size_t bytes);
void count_removed(c10::DeviceIndex index, size_t bytes);
c10::DeviceAllocator *device_allocator();
at::Allocator *pinned_allocator();
bool is_pinned(const void *pointer);
void register_allocators();
// Throws OutOfMemoryError with the bytes requested and the bytes free.
[[noreturn]] void out_of_memory(const std::string &cause, int64_t asked);

// ---- vendor.cpp: memory of a vendor's device ----

// While an object of it exists, this thread allocates CPU tensors in the vendor's memory, if there is a vendor.
class InVendorMemory {
public:
    InVendorMemory();
    ~InVendorMemory();
    InVendorMemory(const InVendorMemory &) = delete;
    InVendorMemory &operator=(const InVendorMemory &) = delete;

private:
    bool before_;
};
// Replaces torch's CPU allocator by one that also knows the vendor's memory.
void register_vendor_memory();
bool is_vendor_memory(const c10::StorageImpl *storage);

// ---- guard.cpp, generator.cpp, hooks.cpp, profiler.cpp ----

void register_guard();
const at::Generator &default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The backing device's generator inside an infini generator; the default one if none is given.
at::Generator generator_below(const std::optional<at::Generator> &generator);
void register_hooks();
void register_profiler();
// Throws in a child of fork() whose parent has used a backing GPU.
void check_fork();

// ---- swap.cpp: every op of the backing device ----

enum class FallbackMode { allow = 0, warn = 1, error = 2 };
void set_fallback_mode(FallbackMode mode);
FallbackMode fallback_mode();
// How many calls of each op outside the library infini ran on twins; `clear` resets the counts.
std::vector<std::pair<std::string, int64_t>> fallback_counts(bool clear);
void register_fallbacks();

// ---- layouts.cpp: layouts that infini does not support ----

void register_layouts();

// ---- kernels.cpp, overrideable.cpp, autocast.cpp: ops with their own code ----

// Names of aten ops (with overload) that kernels.cpp and overrideable.cpp implement.
bool has_own_kernel(const c10::OperatorName &name);
void register_kernels();
void register_overrideable();
void register_autocast();

} // namespace infini::device
