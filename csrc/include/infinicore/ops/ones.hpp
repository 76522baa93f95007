// ones: 1 in every element of a tensor; ones() makes a float32 tensor without dimensions on the current device.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class Ones {
public:
    using schema = void (*)(Tensor);
    static void execute(Tensor output);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor ones();
void ones_(Tensor output);

} // namespace infinicore::op
