// What torch.autograd.profiler needs of a device: time stamps on its stream. On the CPU an op is done when its call
// returns, so the clock is read; with CUDA its own events are used.
#include "device.h"

#include <chrono>

#include <torch/csrc/profiler/stubs/base.h>

namespace infini::device {
namespace {

using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::ProfilerVoidEventStub;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

class Stubs final : public ProfilerStubs {
public:
    void record(c10::DeviceIndex *device, ProfilerVoidEventStub *event, int64_t *cpu_ns) const override {
        if (device != nullptr) {
            *device = current_index();
        }
        const int64_t now = now_ns();
        *event = std::make_shared<int64_t>(now);
        if (cpu_ns != nullptr) {
            *cpu_ns = now;
        }
    }
    float elapsed(const ProfilerVoidEventStub *start, const ProfilerVoidEventStub *end) const override {
        const auto ns = [](const ProfilerVoidEventStub *event) { return *static_cast<const int64_t *>(event->get()); };
        return static_cast<float>(ns(end) - ns(start)) / 1000.0f; // microseconds
    }
    void mark(const char *) const override {}
    void rangePush(const char *) const override {}
    void rangePop() const override {}
    bool enabled() const override { return true; }
    void onEachDevice(std::function<void(int)> call) const override {
        for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
            call(i);
        }
    }
    void synchronize() const override { c10::impl::getDeviceGuardImpl(kInfini)->synchronizeDevice(current_index()); }
};

} // namespace

void register_profiler() {
    static const Stubs stubs;
    torch::profiler::impl::registerPrivateUse1Methods(
        backing.type == c10::kCPU ? const_cast<Stubs *>(&stubs)
                                  : const_cast<ProfilerStubs *>(torch::profiler::impl::cudaStubs()));
}

} // namespace infini::device
