// What torch asks about device infini outside of its dispatcher: whether it is available, its generators, the device of
// a pointer, pinned memory, and resizing a storage.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace infini::device {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex index) const override {
        return backing.type == c10::kCPU ? index <= 0 : at::detail::getCUDAHooks().hasPrimaryContext(index);
    }
    void init() const override {
        check_fork();
        if (backing.type != c10::kCPU) {
            at::detail::getCUDAHooks().init();
        }
    }

    c10::DeviceIndex deviceCount() const override { return device_count(); }
    c10::DeviceIndex getCurrentDevice() const override { return current_index(); }
    void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return guard()->exchangeDevice(c10::Device(kInfini, index)).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return index < 0 ? current_index() : exchangeDevice(index);
    }

    const at::Generator &getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }

    at::Device getDeviceFromPtr(void *data) const override {
        return {kInfini, backing.type == c10::kCPU ? c10::DeviceIndex(0)
                                                   : at::detail::getCUDAHooks().getDeviceFromPtr(data).index()};
    }
    bool isPinnedPtr(const void *data) const override { return is_pinned(data); }
    at::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }

    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        resize_storage(storage.unsafeGetStorageImpl(), bytes);
    }

private:
    static const c10::impl::DeviceGuardImplInterface *guard() { return c10::impl::getDeviceGuardImpl(kInfini); }
};

} // namespace

void register_hooks() {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
}

} // namespace infini::device
