// Recording: notes a thread's ops between start and stop, and runs them again. On the CPU the planned ops run one after
// another; on other devices they are captured once and replayed as one graph.
#include "infinicore/graph/graph.hpp"

#include <cxxabi.h>
#include <typeinfo>

#include "allocator.h"
#include "error.h"
#include "infinicore/context/context.hpp"
#include "recording.h"
#include "thread_state.h"

namespace infinicore {

namespace graph {

struct Resources {
    Device device;
    std::shared_ptr<GraphPool> pool;
    std::vector<std::shared_ptr<GraphPool>> pools; // of fused ops, and of allocations during a capture
    std::vector<std::shared_ptr<Memory>> memory;   // the memory that recorded ops use, besides the pool's
    std::vector<std::string> fused;
    infinirtGraphExec_t exec = nullptr;
    std::string not_captured;      // the reason
    infinirtEvent_t ran = nullptr; // marks the end of the latest run, and so of all runs
    uint64_t ran_on = 0;           // the id of that run's stream

    // Makes the stream wait for the previous run, which another thread may have queued, because runs share their
    // memory.
    void begin_run(const StreamId &stream) {
        if (ran == nullptr) {
            check(infinirtEventCreateWithFlags(&ran, INFINIRT_EVENT_DISABLE_TIMING));
        } else if (ran_on != stream.id && infinirtStreamWaitEvent(stream.stream, ran) != INFINI_STATUS_SUCCESS) {
            check(infinirtDeviceSynchronize()); // the caller captured the previous run, so its order is not known
        }
    }
    void end_run(const StreamId &stream) {
        if (infinirtEventRecord(ran, stream.stream) != INFINI_STATUS_SUCCESS) {
            infinirtStreamSynchronize(stream.stream);
        }
        ran_on = stream.id;
    }
};

GraphTensor::GraphTensor(const Tensor &tensor) : Tensor(tensor) {
    resume_from_blob_();
    Recording *const recording = current_recording();
    if (recording != nullptr) {
        Recorder::keep(*recording, tensor);
        impl_ = nullptr;
        *static_cast<Tensor *>(this) = tensor->to_blob();
    }
}

void GraphTensor::resume() const {
    resume_from_blob_();
}

GraphOperator::~GraphOperator() {
    if (deleter_ != nullptr && planned_meta_ != nullptr) {
        deleter_(&planned_meta_);
    }
}

void GraphOperator::run() const {
    if (runner_ == nullptr) {
        fail("infinicore::graph::GraphOperator: an op without a runner was recorded");
    }
    runner_(planned_meta_);
}

std::string GraphOperator::name() const {
    int status = 0;
    char *const text = abi::__cxa_demangle(typeid(*this).name(), nullptr, nullptr, &status);
    std::string name = status == 0 ? text : typeid(*this).name();
    std::free(text);
    return name.substr(name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1);
}

Graph::Graph() : resources_(std::make_unique<Resources>()) {}

Graph::~Graph() {
    if (resources_->ran != nullptr) {
        // Runs queued by other threads may still use memory that returns to the cache now.
        infinirtEventSynchronize(resources_->ran);
        infinirtEventDestroy(resources_->ran);
    }
    if (resources_->exec != nullptr) {
        infinirtGraphExecDestroy(resources_->exec);
    }
}

void Graph::add_operator(std::shared_ptr<GraphOperator> op) {
    op_list_.push_back(std::move(op));
}

void Graph::run() const {
    if (current_recording() != nullptr) {
        fail("infinicore::graph::Graph::run: a graph cannot be run while another one is recorded");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    context::setDevice(resources_->device);
    ThreadState *const state = ThreadState::current();
    if (state->launch_stream(resources_->device) == nullptr) { // each op is done when it returns
        run_ops();
    } else {
        const StreamId stream = state->stream(resources_->device);
        resources_->begin_run(stream);
        try {
            resources_->exec != nullptr ? check(infinirtGraphLuanch(resources_->exec, stream.stream)) : run_ops();
        } catch (...) { // the preceding ops are queued
            resources_->end_run(stream);
            throw;
        }
        resources_->end_run(stream);
    }
    if (resources_->pool != nullptr) {
        resources_->pool->ran->store(true, std::memory_order_release);
    }
}

void Graph::run_ops() const {
    for (const std::shared_ptr<GraphOperator> &op : op_list_) {
        op->run();
    }
}

// Ends the recording and makes the graph ready to run.
void Graph::instantiate() {
    if (resources_->device.getType() == Device::Type::CPU || op_list_.empty()) {
        return;
    }
    const infinirtStream_t stream = own_stream();
    check(infinirtStreamBeginCapture(stream, INFINIRT_STREAM_CAPTURE_MODE_RELAXED));
    const auto pool = std::make_shared<GraphPool>();
    pool->ran->store(true); // memory that host functions allocate during the capture is used by their ops at once
    ThreadState::current()->capture_pool = pool;
    const GraphOperator *captured_op = nullptr;
    try {
        for (const std::shared_ptr<GraphOperator> &op : op_list_) {
            captured_op = op.get();
            op->run();
        }
    } catch (const std::exception &error) {
        const std::string said = error.what(); // a message from Python has lines with a traceback
        resources_->not_captured = captured_op->name() + ": " + said.substr(0, said.find('\n'));
    }
    ThreadState::current()->capture_pool = nullptr;
    infinirtGraph_t captured = nullptr;
    const infiniStatus_t ended = infinirtStreamEndCapture(stream, &captured);
    if (ended == INFINI_STATUS_SUCCESS && resources_->not_captured.empty()) {
        char log[512] = "";
        if (infinirtGraphInstantiate(&resources_->exec, captured, nullptr, log, sizeof log) != INFINI_STATUS_SUCCESS) {
            resources_->not_captured = log;
        }
    } else if (resources_->not_captured.empty()) {
        resources_->not_captured = infiniGetLastErrorMessage();
    }
    if (captured != nullptr) {
        infinirtGraphDestroy(captured);
    }
    if (resources_->exec != nullptr) {
        resources_->pools.push_back(pool);
    } else {
        warn("a graph of ", op_list_.size(), " ops on ", resources_->device.toString(),
             " runs op by op, because it could not be captured: ", resources_->not_captured);
    }
}

std::string Graph::report() const {
    std::string text = message("graph of ", op_list_.size(), " ops on ", resources_->device.toString(), ", ");
    if (resources_->exec != nullptr) {
        text += "captured";
    } else if (resources_->not_captured.empty()) {
        text += "run op by op";
    } else {
        text += "run op by op, because it could not be captured: " + resources_->not_captured;
    }
    for (const std::string &fused : resources_->fused) {
        text += "\nfused: " + fused;
    }
    for (const std::shared_ptr<GraphOperator> &op : op_list_) {
        text += "\n  " + op->name();
    }
    return text;
}

} // namespace graph

void Recorder::keep(Recording &recording, const Tensor &tensor) {
    const std::shared_ptr<Memory> &memory = tensor->memory();
    graph::Resources &resources = *recording.graph->resources_;
    // The pool's blocks live as long as the graph anyway, and are reused while it is recorded.
    const bool of_pool = memory->is_pooled_by(recording.pool->ran);
    if (!of_pool && (resources.memory.empty() || resources.memory.back() != memory)) {
        resources.memory.push_back(memory);
    }
}

void Recorder::start() {
    ThreadState *const state = ThreadState::current();
    if (state->recording != nullptr) {
        warn("startGraphRecording: a recording of ", state->recording->graph->size(),
             " ops was under way, which is dropped");
        state->recording.reset();
    }
    auto recording = std::make_unique<Recording>();
    recording->device = context::getDevice();
    recording->graph = std::make_shared<graph::Graph>();
    recording->pool = std::make_shared<GraphPool>();
    recording->graph->resources_->device = recording->device;
    recording->graph->resources_->pool = recording->pool;
    state->recording = std::move(recording);
}

void Recorder::add(std::shared_ptr<graph::GraphOperator> op) {
    Recording *const recording = current_recording();
    if (recording == nullptr) {
        fail("infinicore::context::addGraphOperator: no graph is recorded on this thread");
    }
    if (op == nullptr) {
        fail("infinicore::context::addGraphOperator: op must not be null");
    }
    if (context::getDevice() != recording->device) {
        fail("infinicore::context::addGraphOperator: an op of a graph must be on its device, ",
             recording->device.toString(), ", got one on ", context::getDevice().toString());
    }
    recording->graph->add_operator(std::move(op));
}

std::shared_ptr<graph::Graph> Recorder::stop() {
    ThreadState *const state = ThreadState::current();
    if (state->recording == nullptr) {
        warn("stopGraphRecording: no graph is recorded on this thread");
        return nullptr;
    }
    const std::unique_ptr<Recording> recording = std::move(state->recording);
    context::setDevice(recording->device);
    graph::Graph &graph = *recording->graph;
    graph.resources_->fused = graph::fuse(graph.op_list_, *recording);
    graph.instantiate();
    return recording->graph;
}

std::shared_ptr<graph::GraphOperator> Recorder::note_apart(const Recording &ended,
                                                           const std::function<void()> &function) {
    ThreadState *const state = ThreadState::current();
    auto apart = std::make_unique<Recording>();
    apart->device = ended.device;
    apart->graph = std::make_shared<graph::Graph>();
    apart->pool = std::make_shared<GraphPool>();
    state->recording = std::move(apart);
    try {
        function();
    } catch (const std::exception &) {
        state->recording.reset(); // leave the two ops as they are
        return nullptr;
    }
    apart = std::move(state->recording);
    if (apart->graph->op_list_.size() != 1) {
        return nullptr;
    }
    ended.graph->resources_->pools.push_back(apart->pool);
    return apart->graph->op_list_.front();
}

namespace context {

bool isGraphRecording() {
    return current_recording() != nullptr;
}

void startGraphRecording() {
    Recorder::start();
}

void addGraphOperator(std::shared_ptr<graph::GraphOperator> op) {
    Recorder::add(std::move(op));
}

std::shared_ptr<graph::Graph> stopGraphRecording() {
    return Recorder::stop();
}

GraphRecording::GraphRecording() {
    if (isGraphRecording()) {
        fail("infinicore::context::GraphRecording: this thread records a graph already");
    }
    startGraphRecording();
    graph_ = current_recording()->graph;
}

GraphRecording::~GraphRecording() {
    if (is_active()) {
        ThreadState::current()->recording.reset();
    }
}

std::shared_ptr<graph::Graph> GraphRecording::stop() {
    return stopGraphRecording();
}

bool GraphRecording::is_active() const {
    const Recording *const recording = current_recording();
    return recording != nullptr && recording->graph == graph_.lock();
}

void GraphRecording::end_at_errors() {
    if (is_active()) {
        current_recording()->ends_at_errors = true;
    }
}

void GraphRecording::op_failed() noexcept {
    const Recording *const recording = current_recording();
    if (recording != nullptr && recording->ends_at_errors) {
        warn("a recording of ", recording->graph->size(),
             " ops is dropped, because a call between its start and its "
             "stop has failed");
        ThreadState::current()->recording.reset();
    }
}

} // namespace context

} // namespace infinicore
