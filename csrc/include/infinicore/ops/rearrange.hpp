// rearrange: y = x, element by element: a copy between any two layouts of one shape and dtype.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class Rearrange {
public:
    using schema = void (*)(Tensor, Tensor);
    static void execute(Tensor y, Tensor x);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor rearrange(Tensor x); // contiguous
void rearrange_(Tensor y, Tensor x);

} // namespace infinicore::op
