// Handles and descriptors of the C ABI: creation, lookup and destruction. The registries are never destroyed, because
// other threads may still call at exit.
#include <cstdint>

#include "c_api.h"
#include "check.h"

struct InfiniopTensorDescriptor {
    infini::TensorView view;
};

namespace infini::c_api {

namespace {

HandleTable<InfiniopHandle> &handles() {
    static auto *const table = new HandleTable<InfiniopHandle>;
    return *table;
}

HandleTable<InfiniopTensorDescriptor> &tensors() {
    static auto *const table = new HandleTable<InfiniopTensorDescriptor>;
    return *table;
}

[[noreturn]] void not_live(const Function &function, const char *argument, const char *what, const char *maker,
                           const void *came) {
    throw Error(INFINI_STATUS_BAD_PARAM, message(function, ": ", argument, " must be ", what, " made by ", maker,
                                                 " and not destroyed, got ", came));
}

template <typename Value>
std::shared_ptr<Value> checked(HandleTable<Value> &table, const Function &function, const char *argument,
                               const char *what, const char *maker, const void *address) {
    not_null(function, argument, address);
    std::shared_ptr<Value> value = table.find(address);
    if (value == nullptr) {
        not_live(function, argument, what, maker, address);
    }
    return value;
}

// a * b, or -1 if the product overflows; a and b are at least 0.
int64_t product(int64_t a, int64_t b) {
    int64_t result;
    return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result) ? -1 : result;
}

constexpr const char *kCreateTensor = "infiniopCreateTensorDescriptor";

TensorView described(size_t ndim, const size_t *shape, const ptrdiff_t *strides, infiniDtype_t dtype) {
    TensorView view;
    if (size_of(dtype) == 0) {
        throw Error(INFINI_STATUS_BAD_TENSOR_DTYPE,
                    message(kCreateTensor, ": dtype must be 1 to 19 (infiniDtype_t), got ", static_cast<int>(dtype)));
    }
    if (ndim > kMaxDims) {
        throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE,
                    message(kCreateTensor, ": ndim must be at most ", kMaxDims, ", got ", ndim));
    }
    if (ndim > 0) {
        not_null(kCreateTensor, "shape", shape);
    }
    view.dtype = dtype;
    view.ndim = static_cast<int>(ndim);
    // No later product of dimensions may overflow, even if one dimension is 0.
    int64_t elements = static_cast<int64_t>(size_of(dtype));
    for (size_t dim = ndim; dim-- > 0;) {
        if (shape[dim] > INT64_MAX) {
            throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE,
                        message(kCreateTensor, ": shape must be below 2^63, got ", shape[dim], " in dimension ", dim));
        }
        view.shape[dim] = static_cast<int64_t>(shape[dim]);
        view.strides[dim] = strides != nullptr ? strides[dim] : elements / static_cast<int64_t>(size_of(dtype));
        elements = product(elements, view.shape[dim] > 0 ? view.shape[dim] : 1);
        if (elements < 0) {
            throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE, message(kCreateTensor,
                                                                ": shape must describe less than 2^63 bytes, "
                                                                "got a dimension ",
                                                                dim, " of ", shape[dim], " too many"));
        }
    }
    int64_t reach = 0;
    for (size_t dim = 0; dim < ndim; ++dim) {
        const int64_t stride = view.strides[dim];
        // One stride beyond the last index counts too, because loops add the stride once more before they stop.
        const int64_t step = stride == INT64_MIN ? -1 : product(stride < 0 ? -stride : stride, view.shape[dim]);
        const int64_t bytes = product(step, static_cast<int64_t>(size_of(dtype)));
        if (bytes < 0 || __builtin_add_overflow(reach, bytes, &reach)) {
            throw Error(INFINI_STATUS_BAD_TENSOR_STRIDES,
                        message(kCreateTensor, ": strides must reach less than 2^63 bytes far, got ", stride,
                                " in dimension ", dim, " of ", view.shape[dim], " elements"));
        }
    }
    return view;
}

} // namespace

HandleTable<Descriptor> &descriptors() {
    static auto *const table = new HandleTable<Descriptor>;
    return *table;
}

InfiniopHandle checked_handle(const Function &function, infiniopHandle_t handle) {
    return *checked(handles(), function, "handle", "a handle", "infiniopCreateHandle", handle);
}

TensorView checked_view(const Function &function, const char *argument, infiniopTensorDescriptor_t desc) {
    return checked(tensors(), function, argument, "a tensor descriptor", kCreateTensor, desc)->view;
}

std::shared_ptr<Descriptor> checked_descriptor(const Function &function, const void *desc) {
    return checked(descriptors(), function, "desc", "an operator descriptor", "an infiniopCreate function", desc);
}

void Memory::operator()(TensorView &view, const char *argument, const void *data) const {
    if (view.dtype != INFINI_DTYPE_INVALID && view.numel() > 0) {
        not_null(function_, argument, data);
    }
    view.data = const_cast<void *>(data);
}

} // namespace infini::c_api

using namespace infini;
using namespace infini::c_api;

infiniStatus_t infiniopCreateHandle(infiniopHandle_t *handle_ptr) {
    return guarded(__func__, [&] {
        not_null("infiniopCreateHandle", "handle_ptr", handle_ptr);
        auto handle = std::make_shared<InfiniopHandle>();
        const infiniStatus_t status = infinirtGetDevice(&handle->device, &handle->device_id);
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status, infiniGetLastErrorMessage());
        }
        const infiniopHandle_t address = handle.get();
        handles().insert(std::move(handle));
        *handle_ptr = address;
    });
}

infiniStatus_t infiniopDestroyHandle(infiniopHandle_t handle) {
    return guarded(__func__, [&] {
        checked_handle("infiniopDestroyHandle", handle);
        handles().erase(handle);
    });
}

infiniStatus_t infiniopCreateTensorDescriptor(infiniopTensorDescriptor_t *desc_ptr, size_t ndim, const size_t *shape,
                                              const ptrdiff_t *strides, infiniDtype_t dtype) {
    return guarded(__func__, [&] {
        not_null(kCreateTensor, "desc_ptr", desc_ptr);
        auto desc = std::make_shared<InfiniopTensorDescriptor>();
        desc->view = described(ndim, shape, strides, dtype);
        const infiniopTensorDescriptor_t address = desc.get();
        tensors().insert(std::move(desc));
        *desc_ptr = address;
    });
}

infiniStatus_t infiniopDestroyTensorDescriptor(infiniopTensorDescriptor_t desc) {
    return guarded(__func__, [&] {
        checked_view("infiniopDestroyTensorDescriptor", "desc", desc);
        tensors().erase(desc);
    });
}

infiniStatus_t infiniopGetDescriptorDeviceType(const InfiniopDescriptor *desc_ptr, infiniDevice_t *device_type) {
    return guarded(__func__, [&] {
        not_null("infiniopGetDescriptorDeviceType", "device_type", device_type);
        *device_type = checked_descriptor("infiniopGetDescriptorDeviceType", desc_ptr)->device_type;
    });
}

infiniStatus_t infiniopGetDescriptorDeviceId(const InfiniopDescriptor *desc_ptr, int *device_id) {
    return guarded(__func__, [&] {
        not_null("infiniopGetDescriptorDeviceId", "device_id", device_id);
        *device_id = checked_descriptor("infiniopGetDescriptorDeviceId", desc_ptr)->device_id;
    });
}
