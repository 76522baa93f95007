// All modules of infinicore::nn.
#pragma once

#include "nn/embedding.hpp"
#include "nn/linear.hpp"
#include "nn/module.hpp"
#include "nn/parameter.hpp"
#include "nn/rmsnorm.hpp"
#include "nn/rope.hpp"
