// C functions by which torch_infini/runtime records into a graph of this library: begin, note, end, bind, run, destroy;
// and, for graphs that Python's infinicore recorded by them, the graph itself.
// What torch calls has its memory planned when the recording is complete, so that an op is noted without a function, in
// its place among InfiniCore's ops, and bound to one at the end. torch_infini/runtime/_graph.py is the only user.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "guard.h"
#include "infinicore/context/context.hpp"
#include "infinicore/graph/graph.hpp"
#include "thread_state.h"

namespace infinicore {
namespace {

using Function = infiniStatus_t (*)(const void *data); // a failure leaves its message with infinirt

// An op that calls a C function, or nothing: the function of the op before it has done its work too.
class BoundOperator : public graph::GraphOperator {
public:
    explicit BoundOperator(std::string name) : name_(std::move(name)) {}
    void bind(Function function, const void *data) {
        function_ = function;
        data_ = data;
    }
    void run() const override {
        if (function_ != nullptr) {
            check(function_(data_));
        }
    }
    std::string name() const override { return name_; }

private:
    const std::string name_;
    Function function_ = nullptr;
    const void *data_ = nullptr;
};

// A recording that torch began, and its graph when it has ended.
struct Recorded {
    std::unique_ptr<DeviceScope> scope = std::make_unique<DeviceScope>(Device::cpu());
    std::unique_ptr<context::GraphRecording> recording = std::make_unique<context::GraphRecording>();
    std::vector<std::shared_ptr<BoundOperator>> ops;
    std::shared_ptr<graph::Graph> graph;
    std::string report;
};

Recorded &recorded(void *handle) {
    return *static_cast<Recorded *>(handle);
}

} // namespace
} // namespace infinicore

using infinicore::BoundOperator;
using infinicore::recorded;
using infinicore::Recorded;

extern "C" {

// Whether this thread records a graph.
INFINI_API bool infinicoreGraphIsRecording(void) {
    return infinicore::context::isGraphRecording();
}

// Begins a recording of this thread, on the CPU. NULL: an error, of a thread that records already.
INFINI_API void *infinicoreGraphBegin(void) {
    void *made = nullptr;
    infini::guarded([&] { made = new Recorded; });
    return made;
}

// Whether the recording is this thread's still; lets errors of calls end it; says that a call has failed.
INFINI_API bool infinicoreGraphIsActive(void *handle) {
    const auto &recording = recorded(handle).recording;
    return recording != nullptr && recording->is_active();
}
INFINI_API void infinicoreGraphEndAtErrors(void *handle) {
    recorded(handle).recording->end_at_errors();
}
INFINI_API void infinicoreGraphOpFailed(void) {
    infinicore::context::GraphRecording::op_failed();
}

// Notes an op that is bound later; `name` is for the report. Returns its place among all ops of the graph, -1: an error.
INFINI_API int64_t infinicoreGraphNote(void *handle, const char *name) {
    int64_t place = -1;
    infini::guarded([&] {
        auto op = std::make_shared<BoundOperator>(name);
        infinicore::context::addGraphOperator(op);
        recorded(handle).ops.push_back(std::move(op));
        place = static_cast<int64_t>(infinicore::current_recording()->graph->size()) - 1;
    });
    return place;
}

// Ends the recording. Fails where another start or stop of this thread has ended it before.
INFINI_API infiniStatus_t infinicoreGraphEnd(void *handle) {
    return infini::guarded([&] {
        Recorded &self = recorded(handle);
        self.graph = self.recording->stop();
        self.recording.reset();
        self.scope.reset();
        bool whole = self.graph != nullptr;
        for (const auto &op : self.ops) {
            whole = whole && op.use_count() > 1; // the graph's
        }
        if (!whole) {
            self.graph.reset();
            infinicore::fail("a start or stop of a recording of InfiniCore's must not come between");
        }
    });
}

// Lets the op noted as number `index` call a function; those that stay unbound do nothing.
INFINI_API infiniStatus_t infinicoreGraphBind(void *handle, size_t index, infinicore::Function function,
                                              const void *data) {
    return infini::guarded([&] { recorded(handle).ops.at(index)->bind(function, data); });
}

INFINI_API infiniStatus_t infinicoreGraphRun(void *handle) {
    return infini::guarded([&] { recorded(handle).graph->run(); });
}

// The graph, a std::shared_ptr<graph::Graph>: valid until infinicoreGraphDestroy.
INFINI_API const void *infinicoreGraphShared(void *handle) {
    return &recorded(handle).graph;
}

// The text of Graph::report(); valid until the next call.
INFINI_API const char *infinicoreGraphReport(void *handle) {
    infini::guarded([&] { recorded(handle).report = recorded(handle).graph->report(); });
    return recorded(handle).report.c_str();
}

// Frees the graph; drops a recording that has not ended.
INFINI_API void infinicoreGraphDestroy(void *handle) {
    delete static_cast<Recorded *>(handle);
}
}
