// The torch ops that torch_infini.device calls this library by: start, wrap, unwrap, and the fallback's setting and
// report. Loading the library registers only these.
#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd.h>

namespace infini::device {
namespace {

// vendor: an infinirt device that backs "cpu", or 0; compute_on: the address of infiniTorchComputeOn.
void start(std::string_view name, int64_t vendor, int64_t compute_on) {
    TORCH_CHECK_VALUE(name == "cpu" || name == "cuda",
                      "torch_infini.device.enable: backing must be \"cpu\" or \"cuda\", got ", name);
    TORCH_CHECK(!backing.started, "torch_infini.device.enable: the device is enabled already");
    TORCH_CHECK(
        !at::isPrivateUse1HooksRegistered() && !c10::impl::hasDeviceGuardImpl(kInfini),
        "torch_infini.device.enable: another out-of-tree backend has registered its device in this process, and "
        "torch has room for one: start the process with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or without it");
    if (name == "cuda") {
        TORCH_CHECK(at::hasCUDA() && c10::impl::hasDeviceGuardImpl(c10::kCUDA),
                    "torch_infini.device.enable: backing \"cuda\" needs a torch with CUDA and a GPU");
        at::globalContext().lazyInitDevice(c10::kCUDA);
        backing = {c10::kCUDA, c10::DispatchKey::CUDA};
    }
    if (vendor != INFINI_DEVICE_CPU) {
        backing.vendor = static_cast<infiniDevice_t>(vendor);
        backing.compute_on = reinterpret_cast<decltype(backing.compute_on)>(compute_on);
        register_vendor_memory();
    }
    register_guard();
    register_allocators();
    register_hooks();
    register_kernels();
    register_overrideable();
    register_fallbacks();
    register_layouts();
    register_autocast();
    register_profiler();
    backing.started = true;
}

void set_fallback(int64_t mode) {
    set_fallback_mode(static_cast<FallbackMode>(mode));
}

int64_t get_fallback() {
    return static_cast<int64_t>(fallback_mode());
}

// "name calls" for each op that ran, because the schema language has no list of pairs.
std::vector<std::string> fallback_report(bool clear) {
    std::vector<std::string> lines;
    for (const auto &[name, calls] : fallback_counts(clear)) {
        lines.push_back(c10::str(name, " ", calls));
    }
    return lines;
}

at::Generator generator(int64_t index) {
    return default_generator(static_cast<c10::DeviceIndex>(index));
}

// Call after the memory of an unwrapped tensor was moved, to share it with other processes.
void follow(const at::Tensor &tensor) {
    c10::StorageImpl *const storage = tensor.storage().unsafeGetStorageImpl();
    follow_twin(storage, twin_of(storage));
}

// Returns when the autograd thread of each device has released all that it has run: a small backward is queued after it
// in that thread. Otherwise a thread that still releases Python objects at the end of the process would abort it.
void settle_autograd() {
    const at::AutoGradMode enabled(true);
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
        const auto options = at::TensorOptions().device(c10::Device(kInfini, i));
        const at::Tensor one = at::ones({}, options);
        torch::autograd::backward({at::ones({}, options).set_requires_grad(true).mul(1)}, {one});
    }
}

TORCH_LIBRARY(infini_device, m) {
    m.def("start(str backing, int vendor, int compute_on) -> ()", &start);
    m.def("wrap(Tensor tensor) -> Tensor", &wrap);
    m.def("unwrap(Tensor tensor) -> Tensor", &unwrap);
    m.def("settle_autograd() -> ()", &settle_autograd);
    m.def("follow(Tensor tensor) -> ()", &follow);
    m.def("default_generator(int index) -> Generator?", &generator);
    m.def("set_fallback(int mode) -> ()", &set_fallback);
    m.def("get_fallback() -> int", &get_fallback);
    m.def("fallback_report(bool clear) -> str[]", &fallback_report);
}

} // namespace
} // namespace infini::device
