// Recorder: begins, extends and ends the graph that the calling thread records; and fusion of recorded ops.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "infinicore/graph/graph.hpp"
#include "thread_state.h"

namespace infinicore {

class Recorder {
public:
    static void start();
    static void add(std::shared_ptr<graph::GraphOperator> op);
    static std::shared_ptr<graph::Graph> stop();
    // Memory used by a recorded op lives as long as the graph.
    static void keep(Recording &recording, const Tensor &tensor);
    // Returns the one op that `function` notes on the device of a recording that has ended; nullptr if it throws or
    // notes several. Its workspace is separate memory, because a graph's free blocks at its end may be in use earlier
    // in it.
    static std::shared_ptr<graph::GraphOperator> note_apart(const Recording &ended,
                                                            const std::function<void()> &function);
};

namespace graph {

// Replaces adjacent ops by one that gives the same bits; returns a line for the report per replacement.
std::vector<std::string> fuse(std::vector<std::shared_ptr<GraphOperator>> &ops, const Recording &recording);

} // namespace graph

} // namespace infinicore
