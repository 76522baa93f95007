// Autocast on infini: which ops compute in the lower precision, in float32, and in the widest type of their arguments,
// as for torch's other accelerators. One boxed function for each rule: torch's own wrappers, a function for each of the
// 170 ops, took the compiler 9 seconds.
#include "device.h"

#include <ATen/autocast_mode.h>

namespace infini::device {
namespace {

using torch::jit::Stack;

// Ops as torch's lists name them: "prod", or "prod, dim_int" with an overload.
#define INFINI_NAME(...) #__VA_ARGS__,
const char *const kLower[] = {AT_FORALL_LOWER_PRECISION_FP(INFINI_NAME)};
const char *const kFloat32[] = {AT_FORALL_FP32(INFINI_NAME)};
const char *const kFloat32Result[] = {AT_FORALL_FP32_SET_OPT_DTYPE(INFINI_NAME)};
const char *const kWidest[] = {AT_FORALL_PROMOTE(INFINI_NAME)};
#undef INFINI_NAME

class NoAutocast {
    c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKey::AutocastPrivateUse1};
};

at::ArrayRef<c10::IValue> arguments(const c10::OperatorHandle &op, const Stack &stack) {
    return torch::jit::last(stack, op.schema().arguments().size());
}

// Calls op with the floating-point tensors among its arguments, also in lists, as `type`; float64 stays.
void call_cast(const c10::OperatorHandle &op, Stack *stack, at::ScalarType type) {
    const NoAutocast guard;
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
        c10::IValue &value = (*stack)[i];
        if (value.isTensor()) {
            value = at::autocast::cached_cast(type, value.toTensor(), kInfini);
        } else if (value.isTensorList()) {
            value = at::autocast::cached_cast(type, at::TensorList(value.toTensorVector()), kInfini);
        }
    }
    op.callBoxed(stack);
}

at::ScalarType lower_type() {
    return at::autocast::get_lower_precision_fp_from_device_type(kInfini);
}

void in_lower(const c10::OperatorHandle &op, Stack *stack) {
    call_cast(op, stack, lower_type());
}

void in_float32(const c10::OperatorHandle &op, Stack *stack) {
    call_cast(op, stack, at::kFloat);
}

void in_widest(const c10::OperatorHandle &op, Stack *stack) {
    at::ScalarType type = lower_type();
    for (const c10::IValue &value : arguments(op, *stack)) {
        if (value.isTensor()) {
            type = at::autocast::prioritize(type, value.toTensor(), kInfini);
        } else if (value.isTensorList()) {
            type = at::autocast::prioritize(type, at::TensorList(value.toTensorVector()), kInfini);
        }
    }
    call_cast(op, stack, type);
}

bool first_is_cast(const c10::OperatorHandle &op, const Stack &stack) {
    const c10::IValue &first = arguments(op, stack)[0];
    return first.isTensor() && at::autocast::is_eligible(first.toTensor(), kInfini);
}

// Reductions: the argument dtype, which converts as they read, is float32 unless it was given.
void with_float32_result(const c10::OperatorHandle &op, Stack *stack) {
    const NoAutocast guard;
    if (first_is_cast(op, *stack)) {
        const auto dtype = op.schema().argumentIndexWithName("dtype");
        c10::IValue &value = (*stack)[stack->size() - op.schema().arguments().size() + static_cast<size_t>(*dtype)];
        if (value.isNone()) {
            value = at::kFloat;
        }
    }
    op.callBoxed(stack);
}

// norm has an op of its own for a given dtype.
void norm_with_float32_result(const c10::OperatorHandle &op, Stack *stack) {
    const NoAutocast guard;
    const bool has_dim = op.operator_name().overload_name == "ScalarOpt_dim";
    const auto with_dtype = c10::Dispatcher::singleton().findSchemaOrThrow("aten::norm", has_dim ? "ScalarOpt_dim_dtype"
                                                                                                 : "ScalarOpt_dtype");
    const at::ScalarType own = arguments(op, *stack)[0].toTensor().scalar_type();
    stack->emplace_back(first_is_cast(op, *stack) ? at::kFloat : own);
    with_dtype.callBoxed(stack);
}

at::Tensor refuse_binary_cross_entropy(const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                                       int64_t) {
    TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
                       "binary_cross_entropy_with_logits or BCEWithLogitsLoss");
}

template <auto *kFunction, size_t kCount>
void register_all(torch::Library &library, const char *const (&names)[kCount]) {
    for (const char *given : names) {
        std::string name = given;
        if (const size_t comma = name.find(", "); comma != std::string::npos) {
            name.replace(comma, 2, ".");
        }
        library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kFunction>());
    }
}

} // namespace

void register_autocast() {
    static auto *all =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFallthrough());
    static auto *library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
    register_all<&in_lower>(*library, kLower);
    register_all<&in_float32>(*library, kFloat32);
    register_all<&in_widest>(*library, kWidest);
    register_all<&with_float32_result>(*library, kFloat32Result);
    register_all<&norm_with_float32_result>(*library, {"norm.Scalar", "norm.ScalarOpt_dim"});
    library->impl("binary_cross_entropy", &refuse_binary_cross_entropy);
}

} // namespace infini::device
