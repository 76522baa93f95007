// What an op of a caller's own includes: tensors, the context, dispatchers and the macros that make it recordable.
#pragma once

#include "../../context/context.hpp"
#include "../../graph/graph.hpp"
#include "../../tensor.hpp"
#include "dispatcher.hpp"
