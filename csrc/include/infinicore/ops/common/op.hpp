// To be included by a caller's own op: tensors, the context, dispatchers and the macros that make it recordable.
#pragma once

#include "../../context/context.hpp"
#include "../../graph/graph.hpp"
#include "../../tensor.hpp"
#include "dispatcher.hpp"
