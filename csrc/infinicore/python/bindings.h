// Shared by the files of the Python module _infinicore: pybind11, the C++ front end, and when the GIL is released.
// module.cpp calls the bind_ functions. torch_infini/compat/infinicore/lib/_infinicore.pyi describes the Python side.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <infinicore/context/context.hpp>
#include <infinicore/device_event.hpp>
#include <infinicore/ops.hpp>

namespace infinicore::python {

namespace py = pybind11;

// Releases objects that threads dropped without the GIL. Call with the GIL.
void release_dropped();
struct ReleasesDropped {
    ReleasesDropped() { release_dropped(); }
    ~ReleasesDropped() { release_dropped(); }
};

// For functions that compute, allocate, copy or wait: other Python threads run meanwhile.
template <typename... Further>
using CallWithoutGil = py::call_guard<ReleasesDropped, py::gil_scoped_release, Further...>;
using WithoutGil = CallWithoutGil<>;

void bind_dropped();
void bind_tensor(py::module_ &module);
void bind_dlpack(py::module_ &module, py::class_<Tensor> &tensor);
void bind_context(py::module_ &module);
void bind_graph(py::module_ &module);
void bind_ops(py::module_ &module);

} // namespace infinicore::python
