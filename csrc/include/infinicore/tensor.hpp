// Tensor: a handle of a strided view of a Memory. Copying a Tensor shares the data; its methods are reached by ->, as
// in t->shape(). Views (narrow, permute, view, ...) share the memory. Invalid arguments throw std::runtime_error.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "../infiniop/tensor_descriptor.h"
#include "device.hpp"
#include "dtype.hpp"
#include "memory.hpp"

namespace infinicore {

using Size = std::size_t;
using Stride = std::ptrdiff_t; // in elements
using Shape = std::vector<Size>;
using Strides = std::vector<Stride>;

class TensorImpl;

struct TensorMetaData {
    Shape shape;
    Strides strides;
    DataType dtype;
    mutable infiniopTensorDescriptor_t desc = nullptr; // created by the first call of TensorImpl::desc()

    TensorMetaData(const Shape &shape, const Strides &strides, const DataType &dtype);
    ~TensorMetaData();
    TensorMetaData(const TensorMetaData &) = delete;
    TensorMetaData &operator=(const TensorMetaData &) = delete;
};

struct TensorData {
    size_t offset = 0; // of the first element from memory->data(), in bytes
    std::shared_ptr<Memory> memory;
};

// One dimension of TensorImpl::narrow().
struct TensorSliceParams {
    size_t dim;
    size_t start;
    Size len;
};

class Tensor {
public:
    // Uninitialized, contiguous. `device` becomes the calling thread's current one; with pin_memory a tensor of the CPU
    // is in pinned memory, which the current device copies faster.
    static Tensor empty(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory = false);
    // Strides at least 0; the memory ends with the last element.
    static Tensor strided_empty(const Shape &shape, const Strides &strides, const DataType &dtype, const Device &device,
                                bool pin_memory = false);
    static Tensor zeros(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory = false);
    static Tensor ones(const Shape &shape, const DataType &dtype, const Device &device, bool pin_memory = false);

    // The caller's memory, which must outlive every use; nothing frees it.
    static Tensor from_blob(void *raw_ptr, const Shape &shape, const DataType &dtype, const Device &device);
    static Tensor strided_from_blob(void *raw_ptr, const Shape &shape, const Strides &strides, const DataType &dtype,
                                    const Device &device);
    // The same for memory that has an owner: `memory` lives as long as the tensor and its views. (An addition to
    // InfiniCore's interface.)
    static Tensor from_memory(std::shared_ptr<Memory> memory, const Shape &shape, const Strides &strides,
                              const DataType &dtype, size_t offset = 0);

    Tensor() = default;
    Tensor(const Tensor &) = default;
    Tensor(Tensor &&) = default;
    Tensor &operator=(const Tensor &) = default;
    Tensor &operator=(Tensor &&) = default;

    // Both throw for an empty handle.
    TensorImpl *operator->();
    const TensorImpl *operator->() const;
    operator bool() const { return impl_ != nullptr; }

protected:
    Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}
    std::shared_ptr<TensorImpl> impl_;
    friend class TensorImpl;

    // Throws if the tensor is no longer usable; see graph::GraphTensor.
    void resume_from_blob_() const;
};

class TensorImpl : public std::enable_shared_from_this<TensorImpl> {
public:
    TensorImpl(const Shape &shape, const DataType &dtype); // contiguous
    TensorImpl(const Shape &shape, const Strides &strides, const DataType &dtype);

    std::byte *data() { return data_.memory == nullptr ? nullptr : data_.memory->data() + data_.offset; }
    const std::byte *data() const { return const_cast<TensorImpl *>(this)->data(); }

    const Shape &shape() const { return meta_.shape; }
    const Strides &strides() const { return meta_.strides; }
    // Strict: the stride of a dimension of one element counts too.
    bool is_contiguous() const;
    Size ndim() const { return meta_.shape.size(); }
    Size numel() const;
    Size size(size_t dim) const;
    size_t element_size() const { return dsize(meta_.dtype); }
    size_t nbytes() const { return numel() * element_size(); } // of the elements
    Stride stride(size_t dim) const;
    DataType dtype() const { return meta_.dtype; }
    Device device() const { return data_.memory->device(); }
    infiniopTensorDescriptor_t desc() const; // belongs to the tensor
    bool is_pinned() const { return data_.memory->is_pinned(); }

    std::string info() const;
    // Waits for the current stream, then prints info() and the values, or writes the elements' bytes in order to a
    // file.
    void debug(const std::string &filename) const;
    void debug() const;

    // The same elements, without ownership of the memory.
    Tensor to_blob() const;

    // The tensor itself if it is on the device; else a contiguous copy, done on return.
    Tensor to(Device device) const;
    // Same shape and dtype; on one device any strides. From or to the host the copy is done on return.
    void copy_from(Tensor src);
    // The tensor itself if it is contiguous, else a copy.
    Tensor contiguous() const;

    Tensor squeeze(size_t dim) const;   // of a dimension of 1
    Tensor unsqueeze(size_t dim) const; // a dimension of 1 with stride 0 at `dim`, 0 to ndim()
    Tensor narrow(const std::vector<TensorSliceParams> &slices) const;
    Tensor permute(const Shape &order) const;
    Tensor view(const Shape &new_shape) const;
    // From this tensor's first element on.
    Tensor as_strided(const Shape &new_shape, const Strides &new_strides) const;

    // (An addition to InfiniCore's interface.)
    const std::shared_ptr<Memory> &memory() const { return data_.memory; }

protected:
    static std::shared_ptr<TensorImpl> empty(const Shape &shape, const DataType &dtype, const Device &device,
                                             bool pin_memory = false);
    static std::shared_ptr<TensorImpl> strided_empty(const Shape &shape, const Strides &strides, const DataType &dtype,
                                                     const Device &device, bool pin_memory = false);
    static std::shared_ptr<TensorImpl> zeros(const Shape &shape, const DataType &dtype, const Device &device,
                                             bool pin_memory = false);
    static std::shared_ptr<TensorImpl> ones(const Shape &shape, const DataType &dtype, const Device &device,
                                            bool pin_memory = false);
    static std::shared_ptr<TensorImpl> from_blob(void *raw_ptr, const Shape &shape, const DataType &dtype,
                                                 const Device &device);
    static std::shared_ptr<TensorImpl> strided_from_blob(void *raw_ptr, const Shape &shape, const Strides &strides,
                                                         const DataType &dtype, const Device &device);
    friend class Tensor;

    TensorMetaData meta_;
    TensorData data_;

private:
    Tensor handle() const; // a Tensor of this
    Tensor view_of(const Shape &shape, const Strides &strides, size_t offset) const;
    std::vector<std::byte> bytes() const; // of all elements in order, on the host
};

} // namespace infinicore
