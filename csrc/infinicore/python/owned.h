// Tensors over memory owned by something else (a torch tensor, a numpy array, a DLPack capsule), and the references
// that keep it alive; defined in tensor.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "bindings.h"

namespace infinicore::python {

// Calls `release` once with the GIL: at once if this thread holds it, otherwise soon, from another thread, without
// waiting. After the interpreter's end it is never called.
void release_with_gil(std::function<void()> release);

// A reference to a Python object that any thread may drop; uses release_with_gil().
std::shared_ptr<PyObject> share(py::object object);

// Contiguous strides, in elements.
Strides contiguous_strides(const Shape &shape);

// A tensor whose element [0, ..., 0] is at `data`; strides are in elements and may be negative. `release`, which keeps
// the memory's owner alive, is called once, by any thread, when the last tensor over the memory is gone.
Tensor tensor_over(void *data, const Shape &shape, const Strides &strides, DataType dtype, const Device &device,
                   std::function<void()> release);

// Calls `function`, which may wait, without the GIL, whether or not this thread holds it: for destructors.
template <typename Function> void without_gil(const Function &function) {
    if (Py_IsInitialized() && PyGILState_Check()) {
        const py::gil_scoped_release release;
        function();
    } else {
        function();
    }
}

} // namespace infinicore::python
