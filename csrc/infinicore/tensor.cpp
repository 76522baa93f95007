// Tensors: their creation, and views that share their memory.
#include "infinicore/tensor.hpp"

#include "error.h"
#include "infinicore/context/context.hpp"
#include "infinicore/ops/ones.hpp"
#include "ops/zeros.h"

namespace infinicore {

namespace {

Strides contiguous_strides(const Shape &shape) {
    Strides strides(shape.size());
    Stride stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
        strides[dim] = stride;
        stride *= static_cast<Stride>(shape[dim]);
    }
    return strides;
}

// The number of elements between the first and the last, inclusive, for non-negative strides; 0 for an empty shape.
// `what` names the function in messages.
size_t extent(const char *what, const Shape &shape, const Strides &strides, DataType dtype) {
    if (strides.size() != shape.size()) {
        fail("infinicore::", what, ": strides must have one number for each of the ", shape.size(), " dimensions, got ",
             text(strides));
    }
    size_t last = 0;
    bool empty = false;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
        if (strides[dim] < 0) {
            fail("infinicore::", what, ": strides must be at least 0, got ", text(strides));
        }
        size_t reach = 0;
        empty |= shape[dim] == 0;
        if (shape[dim] > 0 && (__builtin_mul_overflow(shape[dim] - 1, static_cast<size_t>(strides[dim]), &reach) ||
                               __builtin_add_overflow(last, reach, &last))) {
            fail("infinicore::", what, ": shape must describe less than 2^63 bytes, got ", text(shape));
        }
    }
    const size_t elements = empty ? 0 : last + 1;
    if (elements > static_cast<size_t>(INT64_MAX) / dsize(dtype)) {
        fail("infinicore::", what, ": shape must describe less than 2^63 bytes, got ", text(shape));
    }
    return elements;
}

// Contiguous strides; throws if the element count overflows.
Strides checked_strides(const char *what, const Shape &shape, DataType dtype) {
    size_t count = dsize(dtype);
    for (const Size size : shape) {
        if (__builtin_mul_overflow(count, size > 0 ? size : 1, &count) || count > static_cast<size_t>(INT64_MAX)) {
            fail("infinicore::", what, ": shape must describe less than 2^63 bytes, got ", text(shape));
        }
    }
    return contiguous_strides(shape);
}

} // namespace

TensorMetaData::TensorMetaData(const Shape &shape_, const Strides &strides_, const DataType &dtype_)
    : shape(shape_), strides(strides_), dtype(dtype_) {
    if (dsize(dtype) == 0) {
        fail("infinicore::Tensor: dtype must be one of DataType's, got ", static_cast<int>(dtype));
    }
}

TensorMetaData::~TensorMetaData() {
    if (desc != nullptr) {
        infiniopDestroyTensorDescriptor(desc);
    }
}

TensorImpl *Tensor::operator->() {
    if (impl_ == nullptr) {
        fail("infinicore::Tensor: an empty tensor has no members");
    }
    return impl_.get();
}

const TensorImpl *Tensor::operator->() const {
    return const_cast<Tensor *>(this)->operator->();
}

void Tensor::resume_from_blob_() const {
    if (impl_ == nullptr) {
        fail("infinicore::graph::GraphTensor: an empty tensor cannot be resumed");
    }
}

Tensor Tensor::empty(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory) {
    return Tensor(TensorImpl::empty(shape, dtype, device, pin_memory));
}
Tensor Tensor::strided_empty(const Shape &shape, const Strides &strides, const DataType &dtype, const Device &device,
                             bool pin_memory) {
    return Tensor(TensorImpl::strided_empty(shape, strides, dtype, device, pin_memory));
}
Tensor Tensor::zeros(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory) {
    return Tensor(TensorImpl::zeros(shape, dtype, device, pin_memory));
}
Tensor Tensor::ones(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory) {
    return Tensor(TensorImpl::ones(shape, dtype, device, pin_memory));
}
Tensor Tensor::from_blob(void *raw_ptr, const Shape &shape, const DataType &dtype, const Device &device) {
    return Tensor(TensorImpl::from_blob(raw_ptr, shape, dtype, device));
}
Tensor Tensor::strided_from_blob(void *raw_ptr, const Shape &shape, const Strides &strides, const DataType &dtype,
                                 const Device &device) {
    return Tensor(TensorImpl::strided_from_blob(raw_ptr, shape, strides, dtype, device));
}

Tensor Tensor::from_memory(std::shared_ptr<Memory> memory, const Shape &shape, const Strides &strides,
                           const DataType &dtype, size_t offset) {
    auto impl = std::make_shared<TensorImpl>(shape, strides, dtype);
    impl->data_ = TensorData{offset, std::move(memory)};
    return Tensor(std::move(impl));
}

TensorImpl::TensorImpl(const Shape &shape, const DataType &dtype) : meta_(shape, contiguous_strides(shape), dtype) {}
TensorImpl::TensorImpl(const Shape &shape, const Strides &strides, const DataType &dtype)
    : meta_(shape, strides, dtype) {}

std::shared_ptr<TensorImpl> TensorImpl::strided_empty(const Shape &shape, const Strides &strides, const DataType &dtype,
                                                      const Device &device, bool pin_memory) {
    auto impl = std::make_shared<TensorImpl>(shape, strides, dtype); // throws for an invalid dtype
    const size_t bytes = extent("Tensor::strided_empty", shape, strides, dtype) * dsize(dtype);
    const bool pinned = pin_memory && device.getType() == Device::Type::CPU;
    if (pinned) { // pinned by the current device, which will copy from it
        impl->data_.memory = context::allocatePinnedHostMemory(bytes);
    } else {
        context::setDevice(device);
        impl->data_.memory = context::allocateMemory(bytes);
    }
    return impl;
}

std::shared_ptr<TensorImpl> TensorImpl::empty(const Shape &shape, const DataType &dtype, const Device &device,
                                              bool pin_memory) {
    return strided_empty(shape, checked_strides("Tensor::empty", shape, dtype), dtype, device, pin_memory);
}

std::shared_ptr<TensorImpl> TensorImpl::zeros(const Shape &shape, const DataType &dtype, const Device &device,
                                              bool pin_memory) {
    auto impl = empty(shape, dtype, device, pin_memory);
    op::zeros_(Tensor(impl));
    return impl;
}

std::shared_ptr<TensorImpl> TensorImpl::ones(const Shape &shape, const DataType &dtype, const Device &device,
                                             bool pin_memory) {
    auto impl = empty(shape, dtype, device, pin_memory);
    op::ones_(Tensor(impl));
    return impl;
}

std::shared_ptr<TensorImpl> TensorImpl::strided_from_blob(void *raw_ptr, const Shape &shape, const Strides &strides,
                                                          const DataType &dtype, const Device &device) {
    if (strides.size() != shape.size()) {
        fail("infinicore::Tensor::strided_from_blob: strides must have one number for each of the ", shape.size(),
             " dimensions, got ", text(strides));
    }
    auto impl = std::make_shared<TensorImpl>(shape, strides, dtype);
    if (raw_ptr == nullptr && impl->numel() > 0) {
        fail("infinicore::Tensor::from_blob: raw_ptr must not be NULL for a tensor of shape ", text(shape));
    }
    impl->data_.memory = std::make_shared<Memory>(static_cast<std::byte *>(raw_ptr), impl->nbytes(), device, nullptr);
    return impl;
}

std::shared_ptr<TensorImpl> TensorImpl::from_blob(void *raw_ptr, const Shape &shape, const DataType &dtype,
                                                  const Device &device) {
    return strided_from_blob(raw_ptr, shape, checked_strides("Tensor::from_blob", shape, dtype), dtype, device);
}

bool TensorImpl::is_contiguous() const {
    Stride stride = 1;
    for (size_t dim = ndim(); dim-- > 0;) {
        if (meta_.strides[dim] != stride) {
            return false;
        }
        stride *= static_cast<Stride>(meta_.shape[dim]);
    }
    return true;
}

Size TensorImpl::numel() const {
    Size count = 1;
    for (const Size size : meta_.shape) {
        count *= size;
    }
    return count;
}

Size TensorImpl::size(size_t dim) const {
    if (dim >= ndim()) {
        fail("infinicore::Tensor::size: dim must be below ", ndim(), ", got ", dim);
    }
    return meta_.shape[dim];
}

Stride TensorImpl::stride(size_t dim) const {
    if (dim >= ndim()) {
        fail("infinicore::Tensor::stride: dim must be below ", ndim(), ", got ", dim);
    }
    return meta_.strides[dim];
}

infiniopTensorDescriptor_t TensorImpl::desc() const {
    infiniopTensorDescriptor_t found = __atomic_load_n(&meta_.desc, __ATOMIC_ACQUIRE);
    if (found == nullptr) {
        infiniopTensorDescriptor_t fresh = nullptr;
        check(infiniopCreateTensorDescriptor(&fresh, ndim(), meta_.shape.data(), meta_.strides.data(),
                                             static_cast<infiniDtype_t>(meta_.dtype)));
        if (__atomic_compare_exchange_n(&meta_.desc, &found, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            return fresh;
        }
        infiniopDestroyTensorDescriptor(fresh);
    }
    return found;
}

std::string TensorImpl::info() const {
    return message("Tensor: shape ", text(meta_.shape), ", strides ", text(meta_.strides), ", dtype ",
                   toString(meta_.dtype), ", device ", device().toString());
}

Tensor TensorImpl::handle() const {
    return Tensor(std::const_pointer_cast<TensorImpl>(shared_from_this()));
}

Tensor TensorImpl::view_of(const Shape &shape, const Strides &strides, size_t offset) const {
    return Tensor::from_memory(data_.memory, shape, strides, meta_.dtype, data_.offset + offset);
}

Tensor TensorImpl::to_blob() const {
    auto memory = std::make_shared<Memory>(const_cast<std::byte *>(data()), nbytes(), device(), nullptr, is_pinned());
    return Tensor::from_memory(std::move(memory), meta_.shape, meta_.strides, meta_.dtype);
}

Tensor TensorImpl::squeeze(size_t dim) const {
    if (dim >= ndim() || meta_.shape[dim] != 1) {
        fail("infinicore::Tensor::squeeze: dim must be that of a dimension of 1 of shape ", text(meta_.shape), ", got ",
             dim);
    }
    Shape shape = meta_.shape;
    Strides strides = meta_.strides;
    shape.erase(shape.begin() + static_cast<Stride>(dim));
    strides.erase(strides.begin() + static_cast<Stride>(dim));
    return view_of(shape, strides, 0);
}

Tensor TensorImpl::unsqueeze(size_t dim) const {
    if (dim > ndim()) {
        fail("infinicore::Tensor::unsqueeze: dim must be at most ", ndim(), ", got ", dim);
    }
    Shape shape = meta_.shape;
    Strides strides = meta_.strides;
    shape.insert(shape.begin() + static_cast<Stride>(dim), 1);
    strides.insert(strides.begin() + static_cast<Stride>(dim), 0);
    return view_of(shape, strides, 0);
}

Tensor TensorImpl::narrow(const std::vector<TensorSliceParams> &slices) const {
    Shape shape = meta_.shape;
    Stride offset = 0;
    for (const TensorSliceParams &slice : slices) {
        if (slice.dim >= ndim()) {
            fail("infinicore::Tensor::narrow: dim must be below ", ndim(), ", got ", slice.dim);
        }
        if (slice.start > shape[slice.dim] || slice.len > shape[slice.dim] - slice.start) {
            fail("infinicore::Tensor::narrow: start + length must be at most ", shape[slice.dim],
                 ", the size of dimension ", slice.dim, ", got ", slice.start, " + ", slice.len);
        }
        shape[slice.dim] = slice.len;
        offset += static_cast<Stride>(slice.start) * meta_.strides[slice.dim];
    }
    return view_of(shape, meta_.strides, static_cast<size_t>(offset) * element_size());
}

Tensor TensorImpl::permute(const Shape &order) const {
    std::vector<bool> seen(ndim(), false);
    bool valid = order.size() == ndim();
    for (size_t i = 0; valid && i < order.size(); ++i) {
        valid = order[i] < ndim() && !seen[order[i]];
        if (valid) {
            seen[order[i]] = true;
        }
    }
    if (!valid) {
        fail("infinicore::Tensor::permute: order must name each of the ", ndim(), " dimensions once, got ",
             text(order));
    }
    Shape shape;
    Strides strides;
    for (const Size dim : order) {
        shape.push_back(meta_.shape[dim]);
        strides.push_back(meta_.strides[dim]);
    }
    return view_of(shape, strides, 0);
}

Tensor TensorImpl::view(const Shape &new_shape) const {
    checked_strides("Tensor::view", new_shape, meta_.dtype);
    Size count = 1;
    for (const Size size : new_shape) {
        count *= size;
    }
    if (count != numel()) {
        fail("infinicore::Tensor::view: the new shape must have ", numel(), " elements as ", text(meta_.shape),
             " has, got ", text(new_shape));
    }
    if (count == 0) {
        return view_of(new_shape, contiguous_strides(new_shape), 0);
    }
    // From the last dimension on: runs of contiguous old dimensions are split into the new ones.
    Strides strides(new_shape.size(), 1);
    size_t dim = new_shape.size();
    Stride step = 1;
    for (size_t old = ndim(); old > 0;) {
        Size run = 1; // elements of a run of contiguous old dimensions
        step = 1;
        bool begun = false;
        while (old > 0 &&
               (meta_.shape[old - 1] == 1 || !begun || meta_.strides[old - 1] == step * static_cast<Stride>(run))) {
            if (meta_.shape[old - 1] != 1) {
                step = begun ? step : meta_.strides[old - 1];
                run *= meta_.shape[old - 1];
                begun = true;
            }
            --old;
        }
        Size covered = 1;
        while (dim > 0 && covered * new_shape[dim - 1] <= run && (covered < run || new_shape[dim - 1] == 1)) {
            strides[dim - 1] = step * static_cast<Stride>(covered);
            covered *= new_shape[--dim];
        }
        if (covered != run) {
            fail("infinicore::Tensor::view: a tensor of shape ", text(meta_.shape), " and strides ",
                 text(meta_.strides), " cannot be seen as ", text(new_shape), " without a copy: use contiguous()");
        }
    }
    return view_of(new_shape, strides, 0);
}

Tensor TensorImpl::as_strided(const Shape &new_shape, const Strides &new_strides) const {
    const size_t elements = extent("Tensor::as_strided", new_shape, new_strides, meta_.dtype);
    if (data_.memory->is_owned() && data_.offset + elements * element_size() > data_.memory->size()) {
        fail("infinicore::Tensor::as_strided: shape ", text(new_shape), " and strides ", text(new_strides),
             " must stay inside of the tensor's memory of ", data_.memory->size(), " bytes");
    }
    return view_of(new_shape, new_strides, 0);
}

} // namespace infinicore
