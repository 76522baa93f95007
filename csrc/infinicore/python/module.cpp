// The Python module _infinicore: the C++ front end (csrc/include/infinicore.hpp) for compat.infinicore. Binds DataType,
// Device with Device.Type, and RoPEAlgo first, because later signatures name them.
#include "bindings.h"

#include <pybind11/operators.h>

namespace infinicore::python {

namespace {

void bind_types(py::module_ &module) {
    py::enum_<DataType>(module, "DataType")
        .value("BYTE", DataType::BYTE)
        .value("BOOL", DataType::BOOL)
        .value("I8", DataType::I8)
        .value("I16", DataType::I16)
        .value("I32", DataType::I32)
        .value("I64", DataType::I64)
        .value("U8", DataType::U8)
        .value("U16", DataType::U16)
        .value("U32", DataType::U32)
        .value("U64", DataType::U64)
        .value("F8", DataType::F8)
        .value("F16", DataType::F16)
        .value("F32", DataType::F32)
        .value("F64", DataType::F64)
        .value("C16", DataType::C16)
        .value("C32", DataType::C32)
        .value("C64", DataType::C64)
        .value("C128", DataType::C128)
        .value("BF16", DataType::BF16);

    // Scripts iterate over Device.Type.__members__ in this order, not that of the values, and expect COUNT last.
    py::class_<Device> device(module, "Device");
    py::enum_<Device::Type>(device, "Type")
        .value("CPU", Device::Type::CPU)
        .value("NVIDIA", Device::Type::NVIDIA)
        .value("CAMBRICON", Device::Type::CAMBRICON)
        .value("ASCEND", Device::Type::ASCEND)
        .value("METAX", Device::Type::METAX)
        .value("MOORE", Device::Type::MOORE)
        .value("ILUVATAR", Device::Type::ILUVATAR)
        .value("QY", Device::Type::QY)
        .value("KUNLUN", Device::Type::KUNLUN)
        .value("HYGON", Device::Type::HYGON)
        .value("COUNT", Device::Type::COUNT);
    device
        .def(py::init<const Device::Type &, const Device::Index &>(), py::arg("type") = Device::Type::CPU,
             py::arg("index") = 0)
        .def_property_readonly("type", [](const Device &self) { return self.getType(); })
        .def_property_readonly("index", [](const Device &self) { return self.getIndex(); })
        .def(py::self == py::self)
        .def(py::self != py::self)
        .def("__hash__",
             [](const Device &self) { return py::hash(py::make_tuple(int(self.getType()), self.getIndex())); })
        .def("__str__", [](const Device &self) { return self.toString(); })
        .def("__repr__", [](const Device &self) { return "<_infinicore.Device " + self.toString() + ">"; });

    py::enum_<nn::RoPE::Algo>(module, "RoPEAlgo")
        .value("GPT_J", nn::RoPE::Algo::GPT_J)
        .value("GPT_NEOX", nn::RoPE::Algo::GPT_NEOX);
}

} // namespace

} // namespace infinicore::python

PYBIND11_MODULE(_infinicore, module) {
    using namespace infinicore::python;
    module.doc() = "InfiniCore's C++ front end: tensors, ops, context and graphs.";
    bind_dropped();
    bind_types(module);
    bind_tensor(module);
    bind_ops(module);
    bind_context(module);
    bind_graph(module);
}
