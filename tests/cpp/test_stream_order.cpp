// What work on streams has to wait for, in infinicore::, with streams that are held up: reuse of memory, runs of a graph
// from several threads, the end of a graph, copies between devices; and memory that a function allocates while captured.
// Usage: test_stream_order [CPU | NVIDIA]; streams of the CPU are queued, those of the emulated CUDA run late.
#include <infinicore.hpp>

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>

#include "check.h"
#include "device.h"

using namespace infinicore;

namespace {

constexpr size_t N = 5000;

// Keeps this thread's stream of the device busy for a while; the emulation needs no help.
void hold(const Device &device) {
    context::setDevice(device);
    if (device == Device::cpu()) {
        const auto sleep = [](void *) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            return INFINI_STATUS_SUCCESS;
        };
        CHECK(infinirtStreamLaunchHostFunction(context::getStream(), sleep, nullptr, nullptr) == INFINI_STATUS_SUCCESS);
    } else if (dlsym(RTLD_DEFAULT, "infinirtEmulatesCuda") == nullptr) {
        static const auto from = context::allocateMemory(size_t{1} << 30),
                          to = context::allocateMemory(size_t{1} << 30);
        for (int i = 0; i < 250; ++i) { // 0.1 s
            context::memcpyD2D(to->data(), from->data(), to->size());
        }
    }
}

Tensor filled(float number, const Device &device) {
    Tensor host = Tensor::empty({N}, DataType::F32, Device::cpu());
    for (size_t i = 0; i < N; ++i) {
        reinterpret_cast<float *>(host->data())[i] = number;
    }
    return host->to(device);
}

// All elements, which must be equal.
float value(const Tensor &tensor) {
    const Tensor host = tensor->to(Device::cpu());
    context::setDevice(Device::cpu());
    context::syncStream();
    const float *const values = reinterpret_cast<const float *>(host->data());
    for (size_t i = 0; i < N; ++i) {
        if (values[i] != values[0]) {
            return -1;
        }
    }
    return values[0];
}

// A thread with streams of its own, which runs one function after another.
class Worker {
public:
    Worker() : thread_([this] { work(); }) {}
    ~Worker() {
        (*this)(nullptr);
        thread_.join();
    }
    void operator()(std::function<void()> function) {
        std::unique_lock<std::mutex> lock(mutex_);
        next_ = std::move(function);
        has_next_ = true;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !has_next_; });
    }

private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (bool goes_on = true; goes_on;) {
            changed_.wait(lock, [this] { return has_next_; });
            goes_on = static_cast<bool>(next_);
            if (goes_on) {
                CHECK_RUNS("worker", next_());
            }
            next_ = nullptr;
            has_next_ = false;
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> next_;
    bool has_next_ = false;
    std::thread thread_;
};

// A tensor that a worker used and dropped, while another device was current there: not used again before the worker's
// stream is past it, and used again then.
void freed_elsewhere(const Device &device) {
    Worker worker;
    Tensor x = filled(3, device), seen = filled(0, device);
    const std::byte *const address = x->data();
    context::setDevice(device);
    context::syncStream();
    worker([&] {
        hold(device);
        Tensor(seen)->copy_from(x);
        context::setDevice(Device::cpu());
        x = Tensor();
    });
    Tensor other = filled(7, device);
    CHECK(other->data() != address);
    worker([&] { CHECK(value(seen) == 3); });
    worker([&] {
        context::setDevice(device);
        context::syncStream();
    });
    const Tensor again = filled(8, device);
    CHECK(again->data() == address && value(other) == 7);
}

// Pinned memory, which the host writes at once, is not given out again while its copy is under way.
void freed_on_the_host(const Device &device) {
    Tensor target = filled(0, device);
    context::setDevice(device);
    context::syncStream();
    hold(device);
    const std::byte *address = nullptr;
    const auto fill = [](Memory &memory, float number) {
        for (size_t i = 0; i < N; ++i) {
            reinterpret_cast<float *>(memory.data())[i] = number;
        }
    };
    {
        const auto source = context::allocatePinnedHostMemory(4 * N);
        address = source->data();
        fill(*source, 5);
        context::memcpyH2D(target->data(), source->data(), 4 * N);
    }
    {
        const auto other = context::allocatePinnedHostMemory(4 * N);
        CHECK(other->data() != address);
        fill(*other, 6);
    }
    CHECK(value(target) == 5);
    context::setDevice(device);
    context::syncStream();
    const auto again = context::allocatePinnedHostMemory(4 * N), more = context::allocatePinnedHostMemory(4 * N);
    CHECK(again->data() == address || more->data() == address);
}

// A graph that runs op by op: a function of it throws where it is captured.
std::shared_ptr<graph::Graph> op_by_op(Tensor &a, const Tensor &b, const Device &device) {
    context::setDevice(device);
    context::startGraphRecording();
    Tensor sum = op::add(a, b);
    bool captures = device != Device::cpu();
    context::addGraphOperator(std::make_shared<graph::HostOperator>([captures]() mutable {
        if (std::exchange(captures, false)) {
            throw std::runtime_error("not while it is captured");
        }
    }));
    a->copy_from(sum);
    return context::stopGraphRecording();
}

// Runs of one graph from two threads share its memory: the second begins when the first is done.
void runs_of_threads(const Device &device) {
    for (const bool captured : {false, true}) {
        Worker worker;
        Tensor a = filled(0, device);
        const Tensor one = filled(1, device);
        std::shared_ptr<graph::Graph> graph;
        if (captured) {
            context::setDevice(device);
            context::startGraphRecording();
            op::add_(a, a, one);
            graph = context::stopGraphRecording();
        } else {
            graph = op_by_op(a, one, device);
            CHECK(device == Device::cpu() || graph->report().find("not while it is captured") != std::string::npos);
        }
        context::setDevice(device);
        context::syncStream();
        hold(device);
        graph->run();
        worker([&] {
            graph->run();
            CHECK(value(a) == 2);
        });
        graph->run();
        CHECK(value(a) == 3);
    }
}

// The end of a graph waits for a run that another thread has queued, also while a stream of the device is captured.
void end_of_a_graph(const Device &device) {
    for (const bool captures : {false, true}) {
        Worker worker;
        Tensor a = filled(0, device);
        auto graph = op_by_op(a, filled(1, device), device);
        context::setDevice(device);
        context::syncStream();
        worker([&] {
            hold(device);
            graph->run();
        });
        infinirtStream_t stream = nullptr;
        infinirtGraph_t nothing = nullptr;
        context::setDevice(device);
        CHECK(infinirtStreamCreate(&stream) == INFINI_STATUS_SUCCESS);
        if (captures) {
            CHECK(infinirtStreamBeginCapture(stream, INFINIRT_STREAM_CAPTURE_MODE_RELAXED) == INFINI_STATUS_SUCCESS);
        }
        graph.reset();
        if (captures) {
            CHECK(infinirtStreamEndCapture(stream, &nothing) == INFINI_STATUS_SUCCESS);
            infinirtGraphDestroy(nothing);
        }
        infinirtStreamDestroy(stream);
        CHECK(value(a) == 1); // read on a stream that waits for no other
    }
}

// A copy between devices comes behind what made its source, and before what changes it, or uses its memory, next.
void between_devices(const Device &first, const Device &second) {
    const Tensor one = filled(1, first), minus = filled(-1, second), other = filled(9, first);
    Tensor y = filled(0, second);
    for (const bool second_is_first : {false, true}) {
        Tensor x = filled(2, first);
        hold(second);
        op::add_(y, y, minus);
        hold(first);
        op::add_(x, x, one);
        y->copy_from(x);
        const Tensor z = x->to(second);
        op::add_(x, other, one);
        x = Tensor();
        const Tensor again = op::add(other, other);
        CHECK(second_is_first || value(again) == 18); // all of the first device is done
        CHECK(value(y) == 3 && value(z) == 3 && value(again) == 18);
    }

    context::setDevice(second);
    context::GraphRecording recording;
    THROWS(y->copy_from(other),
           "infinicore::Tensor::copy_from: a copy from another device, NVIDIA:0, cannot be recorded: "
           "copy before startGraphRecording()");
}

// What a function allocates while it is captured stays the graph's, which writes there at every run.
void captured_allocations(const Device &device) {
    Tensor x = filled(2, device), y = filled(0, device);
    context::setDevice(device);
    context::syncStream();
    context::trimMemory(device);
    const size_t in_use = context::memoryStats(device).in_use;
    context::startGraphRecording();
    context::addGraphOperator(std::make_shared<graph::HostOperator>([=] { op::add_(y, op::mul(x, x), x); }));
    auto graph = context::stopGraphRecording();
    const Tensor other = filled(7, device), more = filled(8, device);
    graph->run();
    CHECK(value(y) == 6 && value(other) == 7 && value(more) == 8);
    graph->run();
    CHECK(value(y) == 6 && value(other) == 7 && value(more) == 8);
    CHECK(device == Device::cpu() || graph->report().find("captured") != std::string::npos);
    graph.reset();
    context::setDevice(device);
    context::syncStream();
    CHECK(context::memoryStats(device).in_use <= in_use + 3 * (4 * N + 4 * N / 8));
}

// Where the cache cannot be trimmed, the sentence says so.
void shortage_in_a_capture(const Device &device) {
    context::setDevice(device);
    {
        const auto cached = context::allocateMemory(1 << 20);
    }
    infinirtStream_t stream = nullptr;
    infinirtGraph_t graph = nullptr;
    CHECK(infinirtStreamCreate(&stream) == INFINI_STATUS_SUCCESS);
    CHECK(infinirtStreamBeginCapture(stream, INFINIRT_STREAM_CAPTURE_MODE_RELAXED) == INFINI_STATUS_SUCCESS);
    std::string said;
    try {
        const auto memory = context::allocateMemory(size_t{1} << 50);
    } catch (const std::runtime_error &error) {
        said = error.what();
    }
    CHECK(said.find("1125899906842624 bytes (1073741824 MiB) of memory of NVIDIA:0 cannot be had: ") !=
          std::string::npos);
    CHECK(
        said.find(" are cached, which could not be trimmed: infinirtFree: no stream of nvidia 0 may be captured at the "
                  "time") != std::string::npos);
    CHECK(infinirtStreamEndCapture(stream, &graph) == INFINI_STATUS_SUCCESS);
    infinirtGraphDestroy(graph);
    infinirtStreamDestroy(stream);
    context::trimMemory(device);
    CHECK(context::memoryStats(device).cached == 0);
}

std::shared_ptr<graph::Graph> left_to_the_end; // of the process, when its thread's streams are gone

} // namespace

int main(int count, char **arguments) {
    setenv("INFINI_CPU_STREAMS", "queued", 1);
    setenv("INFINI_EMULATED_STREAMS", "late", 1);
    const Device device = device_of(count, arguments);
    CHECK_RUNS("freed_elsewhere", freed_elsewhere(device));
    CHECK_RUNS("freed_on_the_host", freed_on_the_host(device));
    CHECK_RUNS("runs_of_threads", runs_of_threads(device));
    CHECK_RUNS("end_of_a_graph", end_of_a_graph(device));
    CHECK_RUNS("captured_allocations", captured_allocations(device));
    if (device != Device::cpu()) {
        CHECK_RUNS("shortage_in_a_capture", shortage_in_a_capture(device));
        if (context::getDeviceCount(device.getType()) > 1) {
            CHECK_RUNS("between_devices", between_devices(device, Device(device.getType(), 1)));
        }
    }
    Tensor a = filled(0, device);
    left_to_the_end = op_by_op(a, filled(1, device), device);
    left_to_the_end->run();
    return failures() != 0;
}
