// C functions that torch_infini/runtime records into a graph of this library with: begin, note, end, bind, run,
// destroy; and access to the graph itself, for graphs that Python's infinicore recorded through them.
// The memory of torch's ops is planned when the recording is complete. So an op is first noted without a function, in
// its place among InfiniCore's ops, and bound to a function at the end. torch_infini/runtime/_graph.py is the only
// user.
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

using Function = infiniStatus_t (*)(const void *data); // on failure it has set infinirt's message

// An op that calls a C function, or does nothing, because a preceding op's function has done its work too.
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

// A recording that torch began, and, once it has ended, its graph.
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

// Begins a recording of this thread, on the CPU. NULL on error, for example if the thread already records.
INFINI_API void *infinicoreGraphBegin(void) {
    void *made = nullptr;
    infini::guarded([&] { made = new Recorded; });
    return made;
}

// Whether the recording is still this thread's. Also lets errors of calls end it, and reports that a call has failed.
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

// Notes an op that is bound later; `name` is for the report. Returns its index among all ops of the graph, -1 on error.
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

// Ends the recording. Fails if another start or stop of this thread has ended it before.
INFINI_API infiniStatus_t infinicoreGraphEnd(void *handle) {
    return infini::guarded([&] {
        Recorded &self = recorded(handle);
        self.graph = self.recording->stop();
        self.recording.reset();
        self.scope.reset();
        bool whole = self.graph != nullptr;
        for (const auto &op : self.ops) {
            whole = whole && op.use_count() > 1; // the graph holds the other reference
        }
        if (!whole) {
            self.graph.reset();
            infinicore::fail("a start or stop of a recording of InfiniCore's must not come between");
        }
    });
}

// Binds the op noted as number `index` to a function; unbound ops do nothing.
INFINI_API infiniStatus_t infinicoreGraphBind(void *handle, size_t index, infinicore::Function function,
                                              const void *data) {
    return infini::guarded([&] { recorded(handle).ops.at(index)->bind(function, data); });
}

INFINI_API infiniStatus_t infinicoreGraphRun(void *handle) {
    return infini::guarded([&] { recorded(handle).graph->run(); });
}

// Returns the graph, a std::shared_ptr<graph::Graph>, valid until infinicoreGraphDestroy.
INFINI_API const void *infinicoreGraphShared(void *handle) {
    return &recorded(handle).graph;
}

// Returns the text of Graph::report(), valid until the next call.
INFINI_API const char *infinicoreGraphReport(void *handle) {
    infini::guarded([&] { recorded(handle).report = recorded(handle).graph->report(); });
    return recorded(handle).report.c_str();
}

// Frees the graph; discards a recording that has not ended.
INFINI_API void infinicoreGraphDestroy(void *handle) {
    delete static_cast<Recorded *>(handle);
}
}
