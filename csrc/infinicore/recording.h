// Recorder: the graph that the calling thread records: its beginning, its ops, its end; and fusion of what was recorded.
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
    // Memory that a recorded op names lives as long as the graph.
    static void keep(Recording &recording, const Tensor &tensor);
    // The one op that `function` notes on the device of a recording that has ended; nullptr where it refuses, or notes
    // more. Its workspace is memory of its own: blocks of the graph that are free at its end may be in use before.
    static std::shared_ptr<graph::GraphOperator> note_apart(const Recording &ended,
                                                            const std::function<void()> &function);
};

namespace graph {

// Replaces neighbouring ops by one that gives the same bits; returns a line for each.
std::vector<std::string> fuse(std::vector<std::shared_ptr<GraphOperator>> &ops, const Recording &recording);

} // namespace graph

} // namespace infinicore
