// Tensor, and the functions that create one: from sizes, from addresses, and over memory that something else owns.
#include "bindings.h"

#include <cstring>
#include <new>

#include "owned.h"

namespace infinicore::python {

namespace {

void *pointer(uintptr_t address) {
    return reinterpret_cast<void *>(address);
}

} // namespace

std::shared_ptr<PyObject> share(py::object object) {
    return {object.release().ptr(), [](PyObject *owned) { release_with_gil([owned] { Py_DECREF(owned); }); }};
}

Strides contiguous_strides(const Shape &shape) {
    Strides strides(shape.size(), 1);
    for (size_t dim = shape.size(); dim-- > 1;) {
        strides[dim - 1] = strides[dim] * Stride(shape[dim]);
    }
    return strides;
}

Tensor tensor_over(void *data, const Shape &shape, const Strides &strides, DataType dtype, const Device &device,
                   std::function<void()> release) {
    Stride first = 0, last = 0; // the lowest and highest reachable element, relative to `data`
    bool is_empty = false;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
        is_empty = is_empty || shape[dim] == 0;
        const Stride reach = shape[dim] ? Stride(shape[dim] - 1) * strides[dim] : 0;
        (reach < 0 ? first : last) += reach;
    }
    if (is_empty) {
        first = last = 0;
    }
    const size_t offset = size_t(-first) * dsize(dtype);
    const size_t bytes = is_empty ? 0 : size_t(last - first + 1) * dsize(dtype);
    auto memory = std::make_shared<Memory>(static_cast<std::byte *>(data) - offset, bytes, device,
                                           [release = std::move(release)](std::byte *) { release(); });
    return Tensor::from_memory(std::move(memory), shape, strides, dtype, offset);
}

// Copies to separate memory: the allocators' memory is not filled while a graph is recorded.
Tensor host_copy(uintptr_t raw_ptr, const Shape &shape, DataType dtype) {
    constexpr std::align_val_t alignment{64};
    size_t bytes = dsize(dtype);
    for (const Size size : shape) {
        bytes *= size;
    }
    void *const data = ::operator new(bytes, alignment);
    std::memcpy(data, pointer(raw_ptr), bytes);
    return tensor_over(data, shape, contiguous_strides(shape), dtype, Device::cpu(),
                       [data] { ::operator delete(data, alignment); });
}

void bind_tensor(py::module_ &module) {
    const auto shape = py::arg("shape"), strides = py::arg("strides"), dtype = py::arg("dtype"),
               device = py::arg("device"), dim = py::arg("dim");
    py::class_<Tensor> tensor(module, "Tensor");
    tensor.def_property_readonly("shape", [](const Tensor &self) { return self->shape(); })
        .def_property_readonly("strides", [](const Tensor &self) { return self->strides(); })
        .def_property_readonly("ndim", [](const Tensor &self) { return self->ndim(); })
        .def_property_readonly("dtype", [](const Tensor &self) { return self->dtype(); })
        .def_property_readonly("device", [](const Tensor &self) { return self->device(); })
        .def("data_ptr", [](const Tensor &self) { return reinterpret_cast<uintptr_t>(self->data()); })
        .def(
            "size", [](const Tensor &self, size_t dim) { return self->size(dim); }, dim)
        .def(
            "stride", [](const Tensor &self, size_t dim) { return self->stride(dim); }, dim)
        .def("numel", [](const Tensor &self) { return self->numel(); })
        .def("element_size", [](const Tensor &self) { return self->element_size(); })
        .def("nbytes", [](const Tensor &self) { return self->nbytes(); })
        .def("is_contiguous", [](const Tensor &self) { return self->is_contiguous(); })
        .def("is_pinned", [](const Tensor &self) { return self->is_pinned(); })
        .def("is_recorded_only", [](const Tensor &self) { return self->memory()->is_recorded_only(); })
        .def("is_recorded_now", [](const Tensor &self) { return self->memory()->is_recorded_now(); })
        .def("set_recorded_now", [](const Tensor &self) { self->memory()->set_recorded_now(); })
        .def("info", [](const Tensor &self) { return self->info(); })
        .def(
            "debug", [](const Tensor &self) { self->debug(); }, WithoutGil())
        .def(
            "debug", [](const Tensor &self, const std::string &filename) { self->debug(filename); },
            py::arg("filename"), WithoutGil())
        .def(
            "copy_", [](Tensor &self, const Tensor &src) { self->copy_from(src); }, py::arg("src"), WithoutGil())
        .def(
            "to", [](const Tensor &self, const Device &device) { return self->to(device); }, device, WithoutGil())
        .def(
            "contiguous", [](const Tensor &self) { return self->contiguous(); }, WithoutGil())
        .def(
            "as_strided",
            [](const Tensor &self, const Shape &shape, const Strides &strides) {
                return self->as_strided(shape, strides);
            },
            shape, strides)
        .def(
            "narrow",
            [](const Tensor &self, size_t dim, size_t start, size_t length) {
                return self->narrow({{dim, start, length}});
            },
            dim, py::arg("start"), py::arg("length"))
        .def(
            "permute", [](const Tensor &self, const Shape &dims) { return self->permute(dims); }, py::arg("dims"))
        .def(
            "view", [](const Tensor &self, const Shape &shape) { return self->view(shape); }, shape)
        .def(
            "unsqueeze", [](const Tensor &self, size_t dim) { return self->unsqueeze(dim); }, dim)
        .def(
            "squeeze", [](const Tensor &self, size_t dim) { return self->squeeze(dim); }, dim)
        .def("__repr__", [](const Tensor &self) { return "<_infinicore." + self->info() + ">"; });
    bind_dlpack(module, tensor);

    const auto pinned = py::arg("pin_memory") = false;
    module.def("empty", &Tensor::empty, shape, dtype, device, pinned, WithoutGil());
    module.def("strided_empty", &Tensor::strided_empty, shape, strides, dtype, device, pinned, WithoutGil());
    module.def("zeros", &Tensor::zeros, shape, dtype, device, pinned, WithoutGil());
    module.def("ones", &Tensor::ones, shape, dtype, device, pinned, WithoutGil());
    module.def(
        "from_blob",
        [](uintptr_t raw_ptr, const Shape &shape, DataType dtype, const Device &device) {
            return Tensor::from_blob(pointer(raw_ptr), shape, dtype, device);
        },
        py::arg("raw_ptr"), shape, dtype, device);
    module.def(
        "strided_from_blob",
        [](uintptr_t raw_ptr, const Shape &shape, const Strides &strides, DataType dtype, const Device &device) {
            return Tensor::strided_from_blob(pointer(raw_ptr), shape, strides, dtype, device);
        },
        py::arg("raw_ptr"), shape, strides, dtype, device);
    module.def(
        "from_owner",
        [](py::object owner, uintptr_t raw_ptr, const Shape &shape, const Strides &strides, DataType dtype,
           const Device &device) {
            if (shape.size() != strides.size()) {
                throw std::runtime_error("infinicore::from_owner: strides must have one number for each of the " +
                                         std::to_string(shape.size()) + " dimensions, got " +
                                         std::to_string(strides.size()));
            }
            return tensor_over(pointer(raw_ptr), shape, strides, dtype, device,
                               [owner = share(std::move(owner))]() mutable { owner.reset(); });
        },
        "strided_from_blob() that keeps a reference to `owner` for as long as a tensor lies in its memory.",
        py::arg("owner"), py::arg("raw_ptr"), shape, strides, dtype, device, py::call_guard<ReleasesDropped>());
    module.def("host_copy", &host_copy, "A contiguous tensor of the CPU with a copy of the elements at an address.",
               py::arg("raw_ptr"), shape, dtype, WithoutGil());
}

} // namespace infinicore::python
