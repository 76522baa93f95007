// Autocast on infini: which ops compute in the lower precision, in float32, and in the widest type of their arguments,
// as for torch's other accelerators.
#include "device.h"

#include <ATen/autocast_mode.h>

namespace infini::device {
namespace {

at::Tensor refuse_binary_cross_entropy(const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                                       int64_t) {
    TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
                       "binary_cross_entropy_with_logits or BCEWithLogitsLoss");
}

} // namespace

void register_autocast() {
    static auto *all =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
    static auto *library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    torch::Library &m = *library; // the name that torch's macros expect
    using namespace at;
    using namespace at::autocast;
#define INFINI_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
    AT_FORALL_LOWER_PRECISION_FP(INFINI_LOWER)
#undef INFINI_LOWER
#define INFINI_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
    AT_FORALL_FP32(INFINI_FP32)
#undef INFINI_FP32
#define INFINI_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
    AT_FORALL_FP32_SET_OPT_DTYPE(INFINI_FP32_DTYPE)
#undef INFINI_FP32_DTYPE
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define INFINI_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_PROMOTE(INFINI_PROMOTE)
#undef INFINI_PROMOTE
    m.impl("binary_cross_entropy", &refuse_binary_cross_entropy);
}

} // namespace infini::device
