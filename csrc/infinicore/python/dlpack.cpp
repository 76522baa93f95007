// DLPack in both directions: the structs of its public ABI (version 1 and the one before), capsules from tensors, and
// tensors from capsules.
#include "bindings.h"

#include <cstring>
#include <string>

#include <infinirt.h>

#include "owned.h"

namespace infinicore::python {

namespace {

// The public ABI of DLPack (dmlc.github.io/dlpack), with its names and fixed values.
enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum DLDataTypeCode : uint8_t {
    kDLInt = 0,
    kDLUInt = 1,
    kDLFloat = 2,
    kDLBfloat = 4,
    kDLComplex = 5,
    kDLBool = 6,
    kDLFloat8_e4m3fn = 10
};
struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};
struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(DLManagedTensor *);
};
struct DLPackVersion {
    uint32_t major;
    uint32_t minor;
};
struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(DLManagedTensorVersioned *);
    uint64_t flags;
    DLTensor dl_tensor;
};
constexpr uint64_t DLPACK_FLAG_BITMASK_READ_ONLY = 1;
static_assert(sizeof(DLManagedTensor) == 64 && sizeof(DLManagedTensorVersioned) == 80);

constexpr char NAME[] = "dltensor", USED[] = "used_dltensor";
constexpr char VERSIONED[] = "dltensor_versioned", USED_VERSIONED[] = "used_dltensor_versioned";

struct TypeRow {
    DataType dtype;
    uint8_t code;
    uint8_t bits;
};
// C16 is missing. F8 is the float8 format that the kernels use.
constexpr TypeRow TYPES[] = {
    {DataType::BOOL, kDLBool, 8},        {DataType::I8, kDLInt, 8},
    {DataType::I16, kDLInt, 16},         {DataType::I32, kDLInt, 32},
    {DataType::I64, kDLInt, 64},         {DataType::U8, kDLUInt, 8},
    {DataType::U16, kDLUInt, 16},        {DataType::U32, kDLUInt, 32},
    {DataType::U64, kDLUInt, 64},        {DataType::F16, kDLFloat, 16},
    {DataType::F32, kDLFloat, 32},       {DataType::F64, kDLFloat, 64},
    {DataType::C32, kDLComplex, 32},     {DataType::C64, kDLComplex, 64},
    {DataType::C128, kDLComplex, 128},   {DataType::BF16, kDLBfloat, 16},
    {DataType::F8, kDLFloat8_e4m3fn, 8}, {DataType::BYTE, kDLUInt, 8}, // after U8, which uint8 is read as
};

DLDataType dl_type(DataType dtype) {
    for (const TypeRow &row : TYPES) {
        if (row.dtype == dtype) {
            return {row.code, row.bits, 1};
        }
    }
    throw py::buffer_error("infinicore: DLPack has no counterpart of dtype " + toString(dtype));
}

DataType data_type(const DLDataType &type) {
    for (const TypeRow &row : TYPES) {
        if (row.code == type.code && row.bits == type.bits && type.lanes == 1) {
            return row.dtype;
        }
    }
    throw py::buffer_error("infinicore::from_dlpack: dtype must have a counterpart in DataType, got DLPack's code " +
                           std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits and " +
                           std::to_string(type.lanes) + " lanes");
}

DLDevice dl_device(const Device &device) {
    switch (device.getType()) {
    case Device::Type::CPU:
        return {kDLCPU, 0};
    case Device::Type::NVIDIA:
        return {kDLCUDA, int32_t(device.getIndex())};
    default:
        throw py::buffer_error("infinicore: DLPack has no counterpart of device " + device.toString());
    }
}

Device device_of(const DLDevice &device) {
    switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
        return Device::cpu();
    case kDLCUDA:
    case kDLCUDAManaged:
        return Device(Device::Type::NVIDIA, size_t(device.device_id));
    default:
        throw py::buffer_error("infinicore::from_dlpack: device must be a CPU or CUDA device, got DLPack's type " +
                               std::to_string(device.device_type));
    }
}

// A tensor handed to a consumer: shape and strides in DLPack's form, and a reference to the memory.
template <typename Managed> struct Exported {
    Tensor tensor;
    bool waits;
    std::vector<int64_t> shape, strides;
    Managed managed{};

    ~Exported() {
        // The consumer may have queued work on its own stream, which our stream-ordered allocator does not know. So
        // wait for all work of the device before the memory is reused.
        infiniDevice_t type;
        int index;
        if (waits && infinirtGetDevice(&type, &index) == INFINI_STATUS_SUCCESS) {
            const Device device = tensor->device();
            infinirtSetDevice(infiniDevice_t(device.getType()), int(device.getIndex()));
            without_gil([] { infinirtDeviceSynchronize(); });
            infinirtSetDevice(type, index);
        }
    }
};

template <typename Managed> Managed *export_tensor(const Tensor &tensor, bool waits) {
    const DLDevice device = dl_device(tensor->device());
    const DLDataType dtype = dl_type(tensor->dtype());
    const Shape &shape = tensor->shape();
    const Strides &strides = tensor->strides();
    auto *exported =
        new Exported<Managed>{tensor, waits, {shape.begin(), shape.end()}, {strides.begin(), strides.end()}};
    Managed &managed = exported->managed;
    managed.dl_tensor = {exported->tensor->data(), device, int32_t(shape.size()), dtype, exported->shape.data(),
                         exported->strides.data(), 0};
    managed.deleter = [](Managed *self) { delete static_cast<Exported<Managed> *>(self->manager_ctx); };
    managed.manager_ctx = exported;
    return &managed;
}

template <typename Managed> py::capsule capsule_of(Managed *managed, const char *name) {
    // A consumer that takes the tensor renames the capsule and calls the deleter itself.
    PyObject *capsule = PyCapsule_New(managed, name, [](PyObject *self) {
        const char *name = PyCapsule_GetName(self);
        if (!name || (std::strcmp(name, NAME) != 0 && std::strcmp(name, VERSIONED) != 0)) {
            return;
        }
        auto *unused = static_cast<Managed *>(PyCapsule_GetPointer(self, name));
        if (unused->deleter) {
            unused->deleter(unused);
        }
    });
    if (!capsule) {
        managed->deleter(managed);
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::capsule>(capsule);
}

py::capsule to_dlpack(const Tensor &tensor, bool versioned, bool waits) {
    if (!versioned) {
        return capsule_of(export_tensor<DLManagedTensor>(tensor, waits), NAME);
    }
    auto *managed = export_tensor<DLManagedTensorVersioned>(tensor, waits);
    managed->version = {1, 0};
    return capsule_of(managed, VERSIONED);
}

template <typename Managed> Tensor take(Managed *managed, py::handle capsule, const char *used) {
    const DLTensor &source = managed->dl_tensor;
    const DataType dtype = data_type(source.dtype);
    const Device device = device_of(source.device);
    const Shape shape(source.shape, source.shape + source.ndim);
    const Strides strides =
        source.strides ? Strides(source.strides, source.strides + source.ndim) : contiguous_strides(shape);
    if (PyCapsule_SetName(capsule.ptr(), used)) {
        throw py::error_already_set();
    }
    std::shared_ptr<Managed> owner(managed, [](Managed *self) {
        if (self->deleter) { // producers, such as numpy, take the GIL there
            release_with_gil([self] { self->deleter(self); });
        }
    });
    return tensor_over(static_cast<std::byte *>(source.data) + source.byte_offset, shape, strides, dtype, device,
                       [owner = std::move(owner)]() mutable { owner.reset(); });
}

Tensor from_capsule(py::object capsule) {
    if (PyCapsule_IsValid(capsule.ptr(), VERSIONED)) {
        auto *managed = static_cast<DLManagedTensorVersioned *>(PyCapsule_GetPointer(capsule.ptr(), VERSIONED));
        if (managed->version.major != 1) {
            throw py::buffer_error("infinicore::from_dlpack: the version of DLPack must be 1.x, got " +
                                   std::to_string(managed->version.major) + "." +
                                   std::to_string(managed->version.minor));
        }
        if (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) {
            throw py::buffer_error("infinicore::from_dlpack: memory must be writable, got memory marked as read-only");
        }
        return take(managed, capsule, USED_VERSIONED);
    }
    if (PyCapsule_IsValid(capsule.ptr(), NAME)) {
        return take(static_cast<DLManagedTensor *>(PyCapsule_GetPointer(capsule.ptr(), NAME)), capsule, USED);
    }
    throw py::type_error("infinicore::from_dlpack: expected a DLPack capsule that nobody has taken yet, got " +
                         py::repr(capsule).cast<std::string>());
}

} // namespace

void bind_dlpack(py::module_ &module, py::class_<Tensor> &tensor) {
    tensor.def("to_dlpack", &to_dlpack,
               "A capsule over the same memory; nothing is waited for. `waits`: once the consumer has dropped it, the "
               "device is waited for before the memory is used again.",
               py::arg("versioned") = true, py::arg("waits") = false);
    tensor.def("dlpack_device", [](const Tensor &self) {
        const DLDevice device = dl_device(self->device());
        return py::make_tuple(device.device_type, device.device_id);
    });
    module.def("from_dlpack", &from_capsule, "A tensor over the memory of a DLPack capsule, which is then used up.",
               py::arg("capsule"), py::call_guard<ReleasesDropped>());
}

} // namespace infinicore::python
