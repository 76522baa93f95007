// Graphs: ops recorded between context::startGraphRecording() and stopGraphRecording(), which run() repeats on the same
// memory. The INFINICORE_GRAPH_OP macros make a caller's own op recordable.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../ops/common/dispatcher.hpp"
#include "../tensor.hpp"

namespace infinicore {
class Recorder;
}

namespace infinicore::graph {

// A tensor that a planned op keeps. While a graph is recorded it does not own the memory: the graph does, so that later
// ops may reuse the memory of tensors that are no longer needed. Otherwise it shares ownership.
class GraphTensor : public Tensor {
public:
    GraphTensor(const Tensor &tensor);
    // Makes it usable when the op runs; throws for an empty tensor.
    void resume() const;
};

// An op with its arguments: the data that plan made for them, and the functions that run and free it.
class GraphOperator {
public:
    using run_schema = void (*)(void *planned_meta);
    using cleanup_schema = void (*)(void **planned_meta);

    GraphOperator() = default;
    GraphOperator(const GraphOperator &) = delete;
    GraphOperator &operator=(const GraphOperator &) = delete;
    virtual ~GraphOperator();
    virtual void run() const;
    virtual std::string name() const; // for report(); the name of the class

protected:
    void *planned_meta_ = nullptr;
    run_schema runner_ = nullptr;
    cleanup_schema deleter_ = nullptr;
};

// A function of the host as an op: work that it queues on context::getStream() becomes part of a device's graph. It
// must keep alive what it uses. (An addition to InfiniCore's interface.)
class HostOperator : public GraphOperator {
public:
    explicit HostOperator(std::function<void()> function, std::string name = "host function")
        : function_(std::move(function)), name_(std::move(name)) {}
    void run() const override { function_(); }
    std::string name() const override { return name_; }

private:
    std::function<void()> function_;
    std::string name_;
};

struct Resources; // the memory of a graph, and its device's executable form

class Graph {
public:
    Graph();
    ~Graph();
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;

    // Queues all ops, in the order of their recording, on this thread's stream of the graph's device, which becomes
    // current. Any thread may call it; runs of one graph are serialized. The first failure throws.
    void run() const;

    // The number of ops, and a text with the ops, the fused ones and how they run. (Additions to InfiniCore's
    // interface.)
    size_t size() const { return op_list_.size(); } // after fusion
    std::string report() const;

protected:
    void add_operator(std::shared_ptr<GraphOperator> op);
    void instantiate();

    std::vector<std::shared_ptr<GraphOperator>> op_list_;

private:
    friend class ::infinicore::Recorder;
    void run_ops() const;
    std::unique_ptr<Resources> resources_;
    mutable std::mutex mutex_;
};

} // namespace infinicore::graph

// An op of the graph kind. In a header: INFINICORE_GRAPH_OP_CLASS(Name, argument types...). In a source: the
// constructor
//   Name::Name(Tensor y, Tensor x) { INFINICORE_GRAPH_OP_DISPATCH(y->device().getType(), y, x); }
//   void Name::execute(Tensor y, Tensor x) { INFINICORE_GRAPH_OP_RECORD_OR_RUN(Name, y, x); }
//   INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(Name);
//   INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(Name, plan, run, cleanup);
// with  void *plan(Tensor y, Tensor x);  void run(void *planned_meta);  void cleanup(void **planned_meta);
#define INFINICORE_GRAPH_OP_CLASS(NAME, ...)                                                                           \
    class NAME : public ::infinicore::graph::GraphOperator {                                                           \
    public:                                                                                                            \
        using schema = void (*)(__VA_ARGS__);                                                                          \
        using plan_schema = void *(*)(__VA_ARGS__);                                                                    \
        static ::infinicore::op::common::OpDispatcher<plan_schema> &plan_dispatcher();                                 \
        static ::infinicore::op::common::OpDispatcher<run_schema> &run_dispatcher();                                   \
        static ::infinicore::op::common::OpDispatcher<cleanup_schema> &cleanup_dispatcher();                           \
        NAME(__VA_ARGS__);                                                                                             \
        static void execute(__VA_ARGS__);                                                                              \
    }

#define INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(NAME)                                                                     \
    ::infinicore::op::common::OpDispatcher<NAME::plan_schema> &NAME::plan_dispatcher() {                               \
        static ::infinicore::op::common::OpDispatcher<NAME::plan_schema> dispatcher(#NAME " (plan)");                  \
        return dispatcher;                                                                                             \
    }                                                                                                                  \
    ::infinicore::op::common::OpDispatcher<NAME::run_schema> &NAME::run_dispatcher() {                                 \
        static ::infinicore::op::common::OpDispatcher<NAME::run_schema> dispatcher(#NAME " (run)");                    \
        return dispatcher;                                                                                             \
    }                                                                                                                  \
    ::infinicore::op::common::OpDispatcher<NAME::cleanup_schema> &NAME::cleanup_dispatcher() {                         \
        static ::infinicore::op::common::OpDispatcher<NAME::cleanup_schema> dispatcher(#NAME " (cleanup)");            \
        return dispatcher;                                                                                             \
    }                                                                                                                  \
    static_assert(true)

#define INFINICORE_GRAPH_OP_DISPATCH(DEVICE_TYPE, ...)                                                                 \
    do {                                                                                                               \
        const ::infinicore::Device::Type infinicore_type = (DEVICE_TYPE);                                              \
        runner_ = run_dispatcher().lookup(infinicore_type);                                                            \
        deleter_ = cleanup_dispatcher().lookup(infinicore_type);                                                       \
        planned_meta_ = plan_dispatcher().lookup(infinicore_type)(__VA_ARGS__);                                        \
    } while (false)

#define INFINICORE_GRAPH_OP_RECORD_OR_RUN(NAME, ...)                                                                   \
    do {                                                                                                               \
        auto infinicore_op = std::make_shared<NAME>(__VA_ARGS__);                                                      \
        if (::infinicore::context::isGraphRecording()) {                                                               \
            ::infinicore::context::addGraphOperator(std::move(infinicore_op));                                         \
        } else {                                                                                                       \
            infinicore_op->run();                                                                                      \
        }                                                                                                              \
    } while (false)

#define INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(NAME, PLAN, RUN, CLEANUP)                                               \
    [[maybe_unused]] static const bool infinicore_registered_##NAME = [] {                                             \
        NAME::plan_dispatcher().registerAll(PLAN);                                                                     \
        NAME::run_dispatcher().registerAll(RUN);                                                                       \
        NAME::cleanup_dispatcher().registerAll(CLEANUP);                                                               \
        return true;                                                                                                   \
    }()
