// The runtime's context (the thread's device and stream, waiting), DeviceEvent, and graphs: recording, Graph, and Python
// callables as operators of a graph.
#include "bindings.h"

#include <optional>

#include <infinirt.h>

#include "owned.h"

namespace infinicore::python {

namespace {

// Streams are numbers in Python, as torch.cuda.ExternalStream takes them. None and 0 mean the current stream.
infinirtStream_t stream_of(std::optional<uintptr_t> stream) {
    return stream ? reinterpret_cast<infinirtStream_t>(*stream) : nullptr;
}

// Keeps `function` until the graph is destroyed. Exceptions of it are raised by Graph.run().
void add_host_operator(py::function function, std::string name) {
    auto kept = share(std::move(function));
    py::gil_scoped_release release;
    auto call = [kept] {
        py::gil_scoped_acquire gil;
        py::handle(kept.get())();
    };
    context::addGraphOperator(std::make_shared<graph::HostOperator>(std::move(call), std::move(name)));
}

// The same graph for Python: its destruction waits for the device, and must not hold the GIL meanwhile.
std::shared_ptr<graph::Graph> for_python(std::shared_ptr<graph::Graph> graph) {
    graph::Graph *const address = graph.get();
    return {address, [kept = std::move(graph)](graph::Graph *) mutable { without_gil([&] { kept.reset(); }); }};
}

// A recording that Python ends by stop(), or drops without instantiating it.
class Recording {
public:
    Recording() { recording_.emplace(); }
    std::shared_ptr<graph::Graph> stop() {
        auto graph = recording_.value().stop();
        recording_.reset();
        return for_python(std::move(graph));
    }
    void drop() { recording_.reset(); }
    bool is_active() const { return recording_ && recording_->is_active(); }
    void end_at_errors() { recording_.value().end_at_errors(); }

private:
    std::optional<context::GraphRecording> recording_;
};

// Existing callers pass CUDA's flags: 1: waiting threads sleep, 2: no timing.
uint32_t event_flags(uint32_t flags) {
    if (flags > 3) {
        throw std::runtime_error(
            "infinicore::DeviceEvent: flags must be an or of 1 (blocking) and 2 (no timing), got " +
            std::to_string(flags));
    }
    return (flags & 1 ? INFINIRT_EVENT_BLOCKING_SYNC : 0) | (flags & 2 ? INFINIRT_EVENT_DISABLE_TIMING : 0);
}

} // namespace

void bind_context(py::module_ &module) {
    module.def("get_device", &context::getDevice);
    module.def("get_device_count", &context::getDeviceCount, py::arg("device_type"), WithoutGil());
    module.def("set_device", &context::setDevice, py::arg("device"), WithoutGil());
    module.def("get_stream", [] { return reinterpret_cast<uintptr_t>(context::getStream()); }, WithoutGil());
    module.def("sync_stream", &context::syncStream, WithoutGil());
    module.def("sync_device", &context::syncDevice, WithoutGil());

    module.def(
        "memory_stats",
        [](const Device &device) {
            const MemoryStats stats = context::memoryStats(device);
            py::dict found;
            found["in_use"] = stats.in_use;
            found["cached"] = stats.cached;
            found["peak_in_use"] = stats.peak_in_use;
            found["allocations"] = stats.allocations;
            found["cache_hits"] = stats.cache_hits;
            return found;
        },
        py::arg("device"));
    module.def("trim_memory", &context::trimMemory, py::arg("device"), WithoutGil());

    const auto device = py::arg("device"), flags = py::arg("flags");
    const auto no_stream = py::arg("stream") = py::none();
    py::class_<DeviceEvent>(module, "DeviceEvent")
        .def(py::init<>(), WithoutGil())
        .def(py::init([](uint32_t flags) { return DeviceEvent(event_flags(flags)); }), flags, WithoutGil())
        .def(py::init<Device>(), device, WithoutGil())
        .def(py::init([](Device device, uint32_t flags) { return DeviceEvent(device, event_flags(flags)); }), device,
             flags, WithoutGil())
        .def(
            "record",
            [](DeviceEvent &self, std::optional<uintptr_t> stream) {
                stream.value_or(0) ? self.record(stream_of(stream)) : self.record();
            },
            no_stream, WithoutGil())
        .def("synchronize", &DeviceEvent::synchronize, WithoutGil())
        .def("query", &DeviceEvent::query, WithoutGil())
        .def("elapsed_time", &DeviceEvent::elapsed_time, py::arg("other"), WithoutGil())
        .def(
            "wait", [](const DeviceEvent &self, std::optional<uintptr_t> stream) { self.wait(stream_of(stream)); },
            no_stream, WithoutGil())
        .def_property_readonly("device", &DeviceEvent::device)
        .def_property_readonly("is_recorded", &DeviceEvent::is_recorded);
}

void bind_graph(py::module_ &module) {
    py::class_<graph::Graph, std::shared_ptr<graph::Graph>>(module, "Graph")
        .def(py::init<>())
        .def("run", &graph::Graph::run, WithoutGil())
        .def("report", &graph::Graph::report);
    py::class_<Recording>(module, "GraphRecording")
        .def(py::init<>())
        .def("stop", &Recording::stop, WithoutGil())
        .def("drop", &Recording::drop, WithoutGil())
        .def("is_active", &Recording::is_active)
        .def("end_at_errors", &Recording::end_at_errors)
        .def_static("op_failed", &context::GraphRecording::op_failed, WithoutGil());
    module.def(
        "shared_graph",
        [](uintptr_t address) { return for_python(*reinterpret_cast<const std::shared_ptr<graph::Graph> *>(address)); },
        "The graph at an address that infinicoreGraphShared gave.", py::arg("address"));
    module.def("is_graph_recording", &context::isGraphRecording);
    module.def("start_graph_recording", &context::startGraphRecording, WithoutGil());
    module.def(
        "stop_graph_recording",
        [] {
            auto graph = context::stopGraphRecording();
            return graph ? for_python(std::move(graph)) : nullptr;
        },
        WithoutGil());
    module.def(
        "add_host_operator", &add_host_operator,
        "Add a call of a Python function without arguments to the graph that is being recorded; name: in report().",
        py::arg("function"), py::arg("name") = "host function");
}

} // namespace infinicore::python
