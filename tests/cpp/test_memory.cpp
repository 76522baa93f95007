// Memory and the context of infinicore::: caches, statistics, threads, streams, events; running out of memory.
// Usage: test_memory [CPU | NVIDIA]
#include <infinicore.hpp>

#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "device.h"

using namespace infinicore;

namespace {

void cache(const Device &device) {
    context::setDevice(device);
    context::trimMemory(device);
    const MemoryStats before = context::memoryStats(device);
    CHECK(before.cached == 0);
    std::byte *first = nullptr;
    {
        const auto memory = context::allocateMemory(1000);
        first = memory->data();
        CHECK(memory->size() == 1000 && memory->device() == device && !memory->is_pinned() && memory->is_owned());
        CHECK(reinterpret_cast<uintptr_t>(first) % 64 == 0);
        const MemoryStats during = context::memoryStats(device);
        CHECK(during.in_use >= before.in_use + 1000 && during.in_use <= before.in_use + 1125);
        CHECK(during.cached == 0 && during.allocations == before.allocations + 1);
    }
    CHECK(context::memoryStats(device).cached >= 1000 && context::memoryStats(device).in_use == before.in_use);
    {
        const auto memory = context::allocateMemory(1010); // of the same size class
        CHECK(memory->data() == first && context::memoryStats(device).cache_hits == before.cache_hits + 1);
        const auto other = context::allocateMemory(1010);
        CHECK(other->data() != memory->data());
    }
    context::trimMemory(device);
    CHECK(context::memoryStats(device).cached == 0);
    CHECK(context::allocateMemory(0)->data() == nullptr);
    CHECK(context::allocateHostMemory(16)->device() == Device::cpu());
    const auto pinned = context::allocatePinnedHostMemory(16);
    CHECK(pinned->is_pinned() && pinned->device() == Device::cpu());
    // A large block is not given to what needs far less.
    std::byte *const large = context::allocateMemory(64 << 20)->data();
    CHECK(context::allocateMemory(40 << 20)->data() != large && context::allocateMemory(63 << 20)->data() == large);
    context::trimMemory(device);

    int freed = 0;
    {
        const Memory mine(reinterpret_cast<std::byte *>(&freed), 4, device, [&](std::byte *) { ++freed; });
    }
    CHECK(freed == 1);
}

void shortage(const Device &device) {
    context::setDevice(device);
    context::trimMemory(device);
    const auto held = context::allocateMemory(1 << 20);
    {
        const auto cached = context::allocateMemory(3 << 20);
    }
    std::string said = "nothing";
    try {
        const auto memory = context::allocateMemory(size_t{1} << 60);
    } catch (const std::runtime_error &error) {
        said = error.what();
    }
    const std::string begins = "infinicore::context: 1152921504606846976 bytes (1099511627776 MiB) of memory of " +
                               device.toString() + " cannot be had: ";
    CHECK(said.compare(0, begins.size(), begins) == 0);
    CHECK(said.find(" are in use, 0 bytes are cached after the cache was trimmed") != std::string::npos);
    CHECK(context::memoryStats(device).cached == 0);
    CHECK(context::allocateMemory(1 << 20)->data() != nullptr);
}

void copies(const Device &device) {
    context::setDevice(device);
    std::vector<unsigned char> source(1000), back(1000);
    for (size_t i = 0; i < source.size(); ++i) {
        source[i] = static_cast<unsigned char>(i * 7);
    }
    const auto a = context::allocateMemory(1000), b = context::allocateMemory(1000);
    context::memcpyH2D(a->data(), source.data(), 1000, false);
    context::memcpyD2D(b->data(), a->data(), 1000);
    context::memcpyD2H(back.data(), b->data(), 1000);
    CHECK(back == source);
    context::memcpyH2H(back.data(), source.data() + 1, 999);
    CHECK(std::memcmp(back.data(), source.data() + 1, 999) == 0);
    THROWS(context::memcpyH2D(nullptr, source.data(), 4), "infinirtMemcpyAsync: dst must not be NULL");
}

void events(const Device &device) {
    context::setDevice(device);
    CHECK(context::getDeviceCount(device.getType()) >= 1 && context::getDeviceCount(Device::Type::QY) == 0);
    CHECK(context::getStream() != nullptr && context::getStream() == context::getStream());
    CHECK(context::getInfiniopHandle(device) == context::getInfiniopHandle(device));
    const infinirtEvent_t start = context::createEvent(), end = context::createEvent();
    context::recordEvent(start, context::getStream());
    op::ones_(Tensor::empty({1 << 16}, DataType::F32, device));
    context::recordEvent(end);
    context::synchronizeEvent(end);
    CHECK(context::queryEvent(end) && context::elapsedTime(start, end) >= 0);
    context::streamWaitEvent(nullptr, start);
    context::destroyEvent(start);
    context::destroyEvent(end);

    DeviceEvent event(device), untimed(device, INFINIRT_EVENT_DISABLE_TIMING);
    CHECK(!event.is_recorded() && event.query() && event.device() == device && event.get() != nullptr);
    event.record();
    event.wait();
    event.synchronize();
    CHECK(event.is_recorded() && event.query());
    DeviceEvent moved(std::move(event));
    CHECK(moved.is_recorded() && event.get() == nullptr);
    untimed.record();
    untimed.synchronize();
    bool has_thrown = false;
    try {
        (void)moved.elapsed_time(untimed);
    } catch (const std::runtime_error &) {
        has_thrown = true;
    }
    CHECK(has_thrown);
    context::syncStream();
    context::syncDevice();
    bool is_refused = false;
    try {
        context::setDevice(Device(Device::Type::CAMBRICON));
    } catch (const std::runtime_error &) {
        is_refused = true;
    }
    CHECK(is_refused && context::getDevice() == device);
}

// Threads have devices and streams of their own; memory that one allocates another may free; nothing is left at the end.
void threads(const Device &device) {
    context::trimMemory(device);
    const MemoryStats before = context::memoryStats(device);
    std::vector<std::vector<Tensor>> made(8);
    std::vector<infinirtStream_t> streams(8);
    std::vector<std::thread> workers;
    for (size_t worker = 0; worker < 8; ++worker) {
        workers.emplace_back([&, worker] {
            CHECK(context::getDevice() == Device::cpu());
            context::setDevice(device);
            streams[worker] = context::getStream();
            for (size_t i = 0; i < 200; ++i) {
                const Size n = 1 + (i * 37 + worker * 101) % 3000;
                Tensor ones = Tensor::ones({n}, DataType::F32, device);
                Tensor sum = op::add(op::add(ones, ones), ones);
                if (i % 10 == 0) {
                    made[worker].push_back(sum);
                }
                const Tensor host = sum->to(Device::cpu());
                context::syncStream(); // of a queued stream of the CPU
                CHECK(reinterpret_cast<const float *>(host->data())[n - 1] == 3);
            }
        });
    }
    for (std::thread &worker : workers) {
        worker.join();
    }
    for (const std::vector<Tensor> &tensors : made) {
        for (const Tensor &tensor : tensors) {
            const Tensor host = tensor->to(Device::cpu());
            CHECK(reinterpret_cast<const float *>(host->data())[0] == 3);
        }
    }
    made.clear();
    CHECK(context::memoryStats(device).in_use == before.in_use);
    context::trimMemory(device);
    CHECK(context::memoryStats(device).cached == 0);
}

// 5,000 tensors of changing shapes leave what was there before, and a bounded number of prepared operators.
void growth(const Device &device) {
    const Tensor weight = Tensor::ones({64}, DataType::F32, device);
    const auto round = [&](size_t rounds) {
        for (size_t i = 0; i < rounds; ++i) {
            op::rms_norm(Tensor::ones({1 + i % 300, 64}, DataType::F32, device), weight);
        }
    };
    round(600);
    const MemoryStats before = context::memoryStats(device);
    round(5000);
    const MemoryStats after = context::memoryStats(device);
    CHECK(after.in_use == before.in_use && after.cached == before.cached);
    CHECK(after.allocations - before.allocations == after.cache_hits - before.cache_hits);
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    CHECK_RUNS("cache", cache(device));
    CHECK_RUNS("shortage", shortage(device));
    CHECK_RUNS("copies", copies(device));
    CHECK_RUNS("events", events(device));
    CHECK_RUNS("threads", threads(device));
    CHECK_RUNS("growth", growth(device));
    return failures() != 0;
}
