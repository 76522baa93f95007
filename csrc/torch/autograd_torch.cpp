// The interface to autograd that the stable ABI lacks: whether a tensor requires a gradient, and counting a write. Both
// call functions that libtorch exports, by weak symbols. With a torch that lacks them the library still loads, warns
// when a gradient is requested (torch_infini/ops/_autograd.py), and counts no writes.
#include "autograd.h"

#include "check.h"
#include "program.h"

// c10::TensorImpl::requires_grad() const, c10::TensorImpl::_fw_grad(uint64_t, const at::TensorBase &) const,
// torch::autograd::impl::bump_version(const at::Tensor &): all arguments are addresses, except for the level.
extern "C" __attribute__((weak)) bool _ZNK3c1010TensorImpl13requires_gradEv(const void *impl);
extern "C" __attribute__((weak)) const void *const *
_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE(const void *impl, uint64_t level, const void *tensor);
extern "C" __attribute__((weak)) void _ZN5torch8autograd4impl12bump_versionERKN2at6TensorE(const void *tensor);

namespace infini {
namespace {

bool sees_autograd() {
    return _ZNK3c1010TensorImpl13requires_gradEv != nullptr &&
           _ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE != nullptr &&
           _ZN5torch8autograd4impl12bump_versionERKN2at6TensorE != nullptr;
}

// A handle is the address of an at::Tensor, whose only member is the address of its TensorImpl.
const void *impl_of(const Tensor &tensor) {
    return *reinterpret_cast<const void *const *>(tensor.get());
}

} // namespace

std::string op_of(const char *registered) {
    std::string op(registered);
    op = op.substr(0, op.find('.'));
    return !op.empty() && op.back() == '_' ? op.substr(0, op.size() - 1) : op;
}

bool is_followed(const Tensor &tensor) {
    return _ZNK3c1010TensorImpl13requires_gradEv != nullptr && _ZNK3c1010TensorImpl13requires_gradEv(impl_of(tensor)) &&
           aoti_torch_grad_mode_is_enabled();
}

void refuse_tangent(const char *op, int index, const Tensor &tensor) {
    if (_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE == nullptr) {
        return;
    }
    // torch has a single level, 0. The function returns an at::Tensor &; if undefined, it is the empty TensorImpl.
    static const Tensor none;
    const void *const *tangent = _ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE(impl_of(tensor), 0, tensor.get());
    if (*tangent != impl_of(none)) {
        Checker(op_of(op).c_str())
            .fail(INFINI_STATUS_BAD_PARAM, "every tensor",
                  "be without a tangent, for the op has no forward-mode derivative (unpack the primal with "
                  "torch.autograd.forward_ad.unpack_dual)",
                  message("argument ", index, " with one"));
    }
}

void refuse_gradient(const char *op, int index) {
    Checker(op_of(op).c_str())
        .fail(INFINI_STATUS_BAD_PARAM, "every tensor",
              "be detached, for the op writes into its arguments and has no backward (call it under torch.no_grad())",
              message("argument ", index, " that requires a gradient"));
}

void count_write(const Tensor &tensor) {
    if (_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE != nullptr && recording == nullptr && tensor.defined()) {
        _ZN5torch8autograd4impl12bump_versionERKN2at6TensorE(tensor.get());
    }
}

Tensor without_backward(const char *op, const Tensor &y, const Tensor &x) {
    namespace stable = torch::stable::detail;
    StableIValue stack[] = {stable::from(y), stable::from(x), stable::from(op_of(op))};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("infini::_without_backward", "", stack, TORCH_ABI_VERSION));
    return stable::to<Tensor>(stack[0]);
}

} // namespace infini

extern "C" INFINI_API bool infiniTorchSeesAutograd() {
    return infini::sees_autograd();
}
