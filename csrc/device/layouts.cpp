// Tensors that infini does not support: sparse, compressed, nested and quantized ones. Every op that would create or
// take one raises the same message.
#include "device.h"

namespace infini::device {
namespace {

void refuse(const c10::OperatorHandle &op, torch::jit::Stack *) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "infini: the device has dense strided tensors only, ",
                                c10::toString(op.operator_name()),
                                " was asked for with a sparse, nested or quantized one: make it dense, or compute it "
                                "on torch_infini.device.unwrap(tensor), which shares the memory");
}

// torch's kernels for every device that would create a tensor that no op takes.
const char *const kMakers[] = {
    "_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe", "_sparse_csc_tensor_unsafe",
    "_sparse_bsr_tensor_unsafe",        "_sparse_bsc_tensor_unsafe",
};

} // namespace

void register_layouts() {
    static auto *libraries = new std::vector<torch::Library>;
    libraries->reserve(6);
    for (const auto key : {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1,
                           c10::DispatchKey::NestedTensorPrivateUse1, c10::DispatchKey::QuantizedPrivateUse1}) {
        libraries->emplace_back(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
        libraries->back().fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
    for (const auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1}) {
        libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
        for (const char *maker : kMakers) {
            libraries->back().impl(maker, torch::CppFunction::makeFromBoxedFunction<&refuse>());
        }
    }
}

} // namespace infini::device
