// Twins: how an infini storage owns a storage of the backing device on the same memory, and how a tensor of one becomes
// a tensor of the other. The context of an infini DataPtr is its twin, so torch's own code, which moves and replaces
// DataPtrs, keeps the two together.
#include "device.h"

#include <mutex>

#include <ATen/core/LegacyTypeDispatch.h>

namespace infini::device {
namespace {

void release_counted(void *context) {
    auto twin = c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl *>(context));
    count_removed(twin->device().index(), twin->nbytes());
}

void release(void *context) {
    c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl *>(context));
}

bool is_ours(const c10::DataPtr &pointer) {
    return pointer.get_deleter() == &release_counted || pointer.get_deleter() == &release;
}

// Adopts foreign memory under an infini storage (DLPack, from_blob): the twin takes over what keeps it alive.
c10::StorageImpl *adopt(c10::StorageImpl *storage) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    c10::DataPtr &pointer = storage->_mutable_data_ptr_no_checks();
    if (!is_ours(pointer)) {
        void *const data = pointer.get();
        const c10::DeviceIndex index = pointer.device().index();
        auto context = pointer.move_context();
        const c10::DeleterFnPtr deleter = context.get_deleter();
        auto twin = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                                                          c10::DataPtr(data, context.release(), deleter, below(index)),
                                                          nullptr, false);
        storage->set_data_ptr_noswap(owning(std::move(twin), index, false));
        storage->set_resizable(false);
    }
    return static_cast<c10::StorageImpl *>(pointer.get_context());
}

// Gives a new TensorImpl the sizes, strides, offset and bits of another tensor.
at::Tensor shaped(c10::intrusive_ptr<c10::TensorImpl> impl, const at::Tensor &like) {
    c10::TensorImpl *const from = like.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
    if (C10_UNLIKELY(like.is_conj())) {
        impl->_set_conj(true);
    }
    if (C10_UNLIKELY(like.is_neg())) {
        impl->_set_neg(true);
    }
    if (C10_UNLIKELY(from->is_wrapped_number())) {
        impl->set_wrapped_number(true);
    }
    return at::Tensor(std::move(impl));
}

} // namespace

c10::StorageImpl *twin_of(c10::StorageImpl *storage) {
    const c10::DataPtr &pointer = storage->_mutable_data_ptr_no_checks();
    return C10_LIKELY(is_ours(pointer)) ? static_cast<c10::StorageImpl *>(pointer.get_context()) : adopt(storage);
}

c10::DataPtr owning(c10::intrusive_ptr<c10::StorageImpl> twin, c10::DeviceIndex index, bool counted) {
    void *const data = twin->_mutable_data_ptr_no_checks().get();
    if (counted) {
        count_added(index, twin->nbytes());
    }
    return {data, twin.release(), counted ? &release_counted : &release,
            c10::Device(kInfini, index < 0 ? c10::DeviceIndex(0) : index)};
}

c10::intrusive_ptr<c10::StorageImpl> storage_around(c10::intrusive_ptr<c10::StorageImpl> twin, bool counted) {
    const size_t bytes = twin->nbytes();
    const bool resizable = twin->resizable();
    const c10::DeviceIndex index = twin->device().index();
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                 owning(std::move(twin), index, counted), device_allocator(),
                                                 resizable);
}

void follow_twin(c10::StorageImpl *storage, c10::StorageImpl *twin) {
    c10::DataPtr &pointer = storage->_mutable_data_ptr_no_checks();
    void *const data = twin->_mutable_data_ptr_no_checks().get();
    if (C10_LIKELY(pointer.get() == data && storage->nbytes() == twin->nbytes())) {
        return;
    }
    const c10::DeviceIndex index = pointer.device().index();
    const bool counted = pointer.get_deleter() == &release_counted;
    if (counted) {
        count_added(index, twin->nbytes());
        count_removed(index, storage->nbytes());
    }
    const c10::DeleterFnPtr deleter = pointer.get_deleter();
    void *const context = pointer.release_context();
    storage->set_data_ptr_noswap(c10::DataPtr(data, context, deleter, c10::Device(kInfini, index)));
    storage->set_nbytes(twin->nbytes());
}

void resize_storage(c10::StorageImpl *storage, size_t bytes) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceIndex index = storage->device().index();
    const c10::DeviceGuard guard(storage->device());
    auto fresh = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, storage->allocator()->allocate(bytes), storage->allocator(), true));
    const int64_t kept = static_cast<int64_t>(std::min(bytes, storage->nbytes()));
    if (kept > 0) {
        const auto options = at::TensorOptions().dtype(at::kByte).device(below(index));
        const auto bytes_of = [&](c10::StorageImpl *of) {
            return at::from_blob(twin_of(of)->mutable_data(), {kept}, options);
        };
        bytes_of(fresh.unsafeGetStorageImpl()).copy_(bytes_of(storage));
    }
    storage->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    storage->set_nbytes(bytes);
}

at::Tensor to_twin(const at::Tensor &tensor) {
    const c10::TensorImpl *const from = tensor.unsafeGetTensorImpl();
    auto twin =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twin_of(from->unsafe_storage().unsafeGetStorageImpl()));
    return shaped(c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(twin)), c10::DispatchKeySet(backing.key),
                                                       from->dtype()),
                  tensor);
}

at::Tensor to_plain_twin(const at::Tensor &tensor) {
    const c10::TensorImpl *const from = tensor.unsafeGetTensorImpl();
    auto twin =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(twin_of(from->unsafe_storage().unsafeGetStorageImpl()));
    return shaped(c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(std::move(twin)),
                                                       c10::DispatchKeySet(backing.key), from->dtype()),
                  tensor);
}

at::Tensor from_view(const at::Tensor &tensor, const at::Tensor &base) {
    const c10::TensorImpl *const of = base.unsafeGetTensorImpl();
    const c10::DispatchKeySet keys =
        of->key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    return shaped(c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(of->unsafe_storage()), keys,
                                                       tensor.unsafeGetTensorImpl()->dtype()),
                  tensor);
}

at::Tensor from_twin(const at::Tensor &tensor, c10::intrusive_ptr<c10::StorageImpl> storage) {
    return shaped(c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                       c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                       tensor.unsafeGetTensorImpl()->dtype()),
                  tensor);
}

at::Tensor from_result(const at::Tensor &tensor) {
    if (C10_UNLIKELY(tensor._is_zerotensor())) { // it has no memory, so the infini tensor gets some
        return from_result(at::zeros(tensor.sizes(), tensor.options()));
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(),
                                "infini: the device has dense strided tensors only, this op gave a tensor of layout ",
                                tensor.layout(), tensor.is_quantized() ? " (quantized)" : "",
                                "; compute it on torch_infini.device.unwrap(tensor), which shares the memory");
    auto twin = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
        tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (C10_UNLIKELY(backing.is_vendors() && !is_vendor_memory(twin.get()))) { // a kernel has allocated its own memory
        const InVendorMemory in_vendor_memory;
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return from_result(tensor.clone());
    }
    return from_twin(tensor, storage_around(std::move(twin), true));
}

at::Tensor unwrap(const at::Tensor &tensor) {
    TORCH_CHECK_TYPE(tensor.device().type() == kInfini,
                     "torch_infini.device.unwrap: tensor must be on infini, got one on ", tensor.device());
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided,
                                "torch_infini.device.unwrap: tensor must be dense, got layout ", tensor.layout());
    auto result = to_twin(tensor);
    tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
    result.storage().unsafeGetStorageImpl()->set_resizable(false);
    return result;
}

at::Tensor wrap(const at::Tensor &tensor) {
    TORCH_CHECK_TYPE(tensor.device().type() == backing.type, "torch_infini.device.wrap: tensor must be on ",
                     c10::Device(backing.type), ", the backing device, got one on ", tensor.device());
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                                "torch_infini.device.wrap: tensor must be dense, got layout ", tensor.layout());
    if (tensor._is_zerotensor()) {
        return from_result(tensor);
    }
    auto twin = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    TORCH_CHECK_NOT_IMPLEMENTED(!backing.is_vendors() || is_vendor_memory(twin.get()),
                                "torch_infini.device.wrap: tensor must be in the memory of the vendor's device (made "
                                "by unwrap), got one in the CPU's; tensor.to(\"infini\") copies it");
    twin->set_resizable(false);
    return from_twin(tensor, storage_around(std::move(twin), false));
}

} // namespace infini::device
