// Tensors over memory that something else owns (a torch tensor, a numpy array, a DLPack capsule), and the references
// that keep it alive; tensor.cpp has both.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "bindings.h"

namespace infinicore::python {

// Calls `release` once with the GIL: now where this thread has it, otherwise soon, by another one; without waiting. After
// the interpreter's end it is not called any more.
void release_with_gil(std::function<void()> release);

// A reference to a Python object that any thread may drop, by release_with_gil().
std::shared_ptr<PyObject> share(py::object object);

// Strides in elements without gaps.
Strides contiguous_strides(const Shape &shape);

// A tensor whose element [0, ..., 0] is at `data`; strides in elements may be negative. `release` is called once, by
// any thread, when the last tensor on this memory is gone, and keeps its owner alive until then.
Tensor tensor_over(void *data, const Shape &shape, const Strides &strides, DataType dtype, const Device &device,
                   std::function<void()> release);

// Calls `function`, which may wait, without the GIL, be it held or not: for what runs when objects are dropped.
template <typename Function> void without_gil(const Function &function) {
    if (Py_IsInitialized() && PyGILState_Check()) {
        const py::gil_scoped_release release;
        function();
    } else {
        function();
    }
}

} // namespace infinicore::python
