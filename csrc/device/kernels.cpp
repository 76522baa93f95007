// Ops of infini with their own code: creating and resizing tensors, views (only sizes and strides change), and copies
// between devices. All other ops go through swap.cpp.
#include "device.h"

#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/tensor_split_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

namespace infini::device {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_infini(const Tensor &tensor) {
    return tensor.device().type() == kInfini;
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
    TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided,
                                "infini: the device has dense strided tensors only, got layout ", *layout);
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

c10::Device device_of(std::optional<at::Device> device) {
    return {kInfini, checked_index(device.value_or(c10::Device(kInfini)))};
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> memory_format) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(device_of(device));
    return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device,
                     std::optional<bool> pin_memory) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(device_of(device));
    return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Makes room in a storage for a tensor of these sizes and strides (empty: contiguous). Called before the tensor gets
// them, so that a storage that cannot grow leaves the tensor as it was.
void make_room(c10::StorageImpl *storage, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset,
               size_t itemsize) {
    if (c10::multiply_integers(size) == 0) {
        return;
    }
    const size_t bytes = stride.data() != nullptr ? at::detail::computeStorageNbytes(size, stride, itemsize, offset)
                                                  : at::detail::computeStorageNbytesContiguous(size, itemsize, offset);
    if (bytes > storage->nbytes()) {
        resize_storage(storage, bytes);
    }
}

const Tensor &resize_(const Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
    TORCH_CHECK(!memory_format || *memory_format != at::MemoryFormat::Preserve, "Unsupported memory format ",
                *memory_format);
    c10::TensorImpl *const impl = self.unsafeGetTensorImpl();
    if (self.sizes() != size) {
        make_room(self.storage().unsafeGetStorageImpl(), size, {}, self.storage_offset(), self.dtype().itemsize());
        impl->set_sizes_contiguous(size);
    }
    if (memory_format) {
        impl->empty_tensor_restride(*memory_format);
    }
    return self;
}

Tensor &set_storage(Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
    TORCH_CHECK(stride.data() == nullptr || size.size() == stride.size(), "unequal size length (", size.size(),
                ") and stride length (", stride.size(), ")");
    if (source.device() == self.device()) { // set_ rejects another device
        make_room(source.unsafeGetStorageImpl(), size, stride, offset, self.dtype().itemsize());
    }
    at::native::checkSetStorage<int64_t>(self, std::move(source), offset, size, stride);
    c10::TensorImpl *const impl = self.unsafeGetTensorImpl();
    if (stride.data() != nullptr) {
        impl->set_sizes_and_strides(size, stride, offset);
    } else {
        impl->set_storage_offset(offset);
        impl->set_sizes_contiguous(size);
    }
    return self;
}

Tensor &set_nothing(Tensor &self) {
    at::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true));
    return set_storage(self, std::move(storage), 0, {0}, {});
}

// Copies from and to infini. torch's own path to other devices makes a contiguous copy that resolves the conjugate by
// another copy, and recurses until the stack overflows.
Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    if (source._is_zerotensor()) { // it has no memory to copy from
        return self.zero_();
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensor to = is_infini(self) ? to_plain_twin(self) : self;
    to.copy_(is_infini(source) ? to_plain_twin(source) : source, non_blocking);
    return self;
}

Tensor copy_from(const Tensor &self, const Tensor &to, bool non_blocking) {
    Tensor written = to;
    return copy_(written, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor &self, const Tensor &to) {
    to.resize_(self.sizes());
    return copy_from(self, to, false);
}

// torch shares the memory until one of the two is written, but would not notify a twin.
Tensor lazy_clone(const Tensor &self) {
    return self.clone();
}

at::Scalar local_scalar(const Tensor &self) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return at::_local_scalar_dense(to_plain_twin(self));
}

// The CPU's kernel would draw from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor &input, double p, std::optional<bool> train) {
    if (!train.value_or(true) || input.numel() == 0) {
        return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    }
    if (p == 1) {
        return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
    }
    const Tensor kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input.mul(kept).mul_(1 / (1 - p)), kept};
}

// torch's own requires indices on the CPU; a program that moves all its tensors to a device has none there. Autograd
// tracks the ops that it calls.
std::vector<Tensor> tensor_split(const Tensor &self, const Tensor &indices_or_sections, int64_t dim) {
    return at::native::tensor_split(self, indices_or_sections.cpu(), dim);
}

void record_stream(Tensor &self, at::Stream stream) {
    device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

const char *const kOwn[] = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::as_strided",
    "aten::view",
    "aten::_reshape_alias",
    "aten::unfold",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::set_",
    "aten::copy_",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_lazy_clone",
    "aten::_local_scalar_dense",
    "aten::native_dropout",
    "aten::record_stream",
    "aten::tensor_split.tensor_indices_or_sections",
    // overrideable.cpp
    "aten::convolution",
    "aten::convolution_backward",
    "aten::convolution_overrideable",
    "aten::convolution_backward_overrideable",
    "aten::_fused_sdp_choice",
    "aten::histc",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    "aten::_thnn_fused_lstm_cell",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_gru_cell_backward",
};

} // namespace

bool has_own_kernel(const c10::OperatorName &name) {
    static const std::unordered_set<std::string> own(std::begin(kOwn), std::end(kOwn));
    return own.count(c10::toString(name)) != 0;
}

void register_kernels() {
    static auto *library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library->impl("empty.memory_format", &empty);
    library->impl("empty_strided", &empty_strided);
    library->impl("resize_", &resize_);
    library->impl("as_strided", &at::native::as_strided_tensorimpl);
    library->impl("view", &at::native::view);
    library->impl("_reshape_alias", &at::native::_reshape_alias);
    library->impl("unfold", &at::native::unfold);
    library->impl("set_.source_Storage", static_cast<Tensor &(*)(Tensor &, at::Storage)>(&at::native::set_));
    library->impl("set_.source_Storage_storage_offset", &set_storage);
    library->impl("set_.source_Tensor", &at::native::set_tensor_);
    library->impl("set_", &set_nothing);
    library->impl("copy_", &copy_);
    library->impl("_copy_from", &copy_from);
    library->impl("_copy_from_and_resize", &copy_from_and_resize);
    library->impl("_lazy_clone", &lazy_clone);
    library->impl("_local_scalar_dense", &local_scalar);
    library->impl("native_dropout", &native_dropout);
    library->impl("record_stream", &record_stream);
    library->impl("tensor_split.tensor_indices_or_sections", &tensor_split);
    static auto *above =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    above->impl("tensor_split.tensor_indices_or_sections", &tensor_split);
}

} // namespace infini::device
