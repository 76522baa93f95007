// Calls every op of the backing device for infini tensors: one boxed kernel replaces the infini tensors among the
// arguments by tensors of their twins, calls the backing device's kernel, and returns infini tensors. It is registered
// directly for each op that has a kernel of that device, so that torch's paths for devices without one are not taken,
// and as the fallback for all other ops.
#include "device.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/util/SmallVector.h>

namespace infini::device {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

std::atomic<FallbackMode> mode{FallbackMode::allow};

// Counts a call of an infini op, "rms_norm.out", without a vendor kernel; also in the replay of a program.
void count_missing(const char *op);

enum class Kind : uint8_t { tensor, tensors, optional_tensors, device, generator };

// An argument that holds tensors, a device or a generator.
struct Slot {
    uint16_t index;
    Kind kind;
    bool is_written;
    bool may_be_on_cpu; // of any size, as index tensors and lengths are
};

struct Plan {
    std::vector<Slot> slots;
    size_t arguments = 0, returns = 0;
    bool is_ours = false;    // an op of the library infini, whose kernels handle autograd themselves
    bool is_aten = false;    // an op whose kernels are called below autograd
    bool is_counted = false; // uses aten's path, and is counted
    bool writes = false;
    std::string name;
};

std::optional<Kind> kind_of(const c10::TypePtr &type) {
    if (const auto optional = type->cast<c10::OptionalType>()) {
        return kind_of(optional->getElementType());
    }
    if (const auto list = type->cast<c10::ListType>()) {
        const c10::TypePtr &element = list->getElementType();
        if (element->kind() == c10::TypeKind::TensorType) {
            return Kind::tensors;
        }
        const auto optional = element->cast<c10::OptionalType>();
        const bool tensors = optional && optional->getElementType()->kind() == c10::TypeKind::TensorType;
        return tensors ? std::optional<Kind>(Kind::optional_tensors) : std::nullopt;
    }
    switch (type->kind()) {
    case c10::TypeKind::TensorType:
        return Kind::tensor;
    case c10::TypeKind::DeviceObjType:
        return Kind::device;
    case c10::TypeKind::GeneratorType:
        return Kind::generator;
    default:
        return std::nullopt;
    }
}

Plan plan_of(const OperatorHandle &op) {
    const c10::FunctionSchema &schema = op.schema();
    Plan plan;
    plan.name = c10::toString(op.operator_name());
    plan.is_ours = plan.name.rfind("infini::", 0) == 0;
    plan.is_aten = plan.name.rfind("aten::", 0) == 0;
    // Filling is part of creating tensors, which the device does itself.
    plan.is_counted = !plan.is_ours && plan.name.rfind("aten::fill_", 0) != 0 && plan.name != "aten::zero_";
    plan.arguments = schema.arguments().size();
    plan.returns = schema.returns().size();
    for (size_t i = 0; i < plan.arguments; ++i) {
        const c10::Argument &argument = schema.arguments()[i];
        if (const auto kind = kind_of(argument.type())) {
            const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
            const std::string &name = argument.name();
            const bool may_be_on_cpu = *kind == Kind::optional_tensors || name == "lengths" || name == "batch_sizes" ||
                                       name == "input_lengths" || name == "target_lengths";
            plan.writes |= written;
            plan.slots.push_back({static_cast<uint16_t>(i), *kind, written, may_be_on_cpu});
        }
    }
    return plan;
}

[[noreturn]] void refuse_mixed(const Plan &plan, const at::Tensor &tensor) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, infini:",
                int(current_index()), " and ", tensor.device(), "! (in a call of ", plan.name, ")");
}

// An infini tensor of a call, and its stand-in on the backing device. Both live until the end of the call: a kernel
// drops its arguments, and other tensors could get their addresses.
struct Swapped {
    at::Tensor original, stand_in;
    c10::StorageImpl *twin;
    bool is_written;
};

// The tensors of one call.
class Call {
public:
    explicit Call(const Plan &plan) : plan_(plan) {}

    at::Tensor below(at::Tensor &&tensor, const Slot &slot, bool followable) {
        if (!tensor.defined()) {
            return std::move(tensor);
        }
        if (tensor.device().type() != kInfini) {
            const bool is_scalar = tensor.device().is_cpu() && tensor.dim() == 0 && !slot.is_written;
            if (!is_scalar && !(slot.may_be_on_cpu && tensor.device().is_cpu())) {
                refuse_mixed(plan_, tensor);
            }
            return std::move(tensor);
        }
        at::Tensor stand_in = plan_.is_aten ? to_plain_twin(tensor) : to_twin(tensor);
        if (followable) {
            watch(tensor, stand_in, slot);
        }
        c10::StorageImpl *const twin = stand_in.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
        swapped_.push_back({std::move(tensor), stand_in, twin, slot.is_written});
        return stand_in;
    }

    // Updates written originals to what the call has done to their stand-ins.
    void follow() {
        for (const Swapped &swapped : swapped_) {
            if (!swapped.is_written) {
                continue;
            }
            c10::TensorImpl *const to = swapped.original.unsafeGetTensorImpl();
            c10::TensorImpl *const from = swapped.stand_in.unsafeGetTensorImpl();
            c10::StorageImpl *const storage = from->unsafe_storage().unsafeGetStorageImpl();
            if (C10_LIKELY(storage == swapped.twin)) {
                follow_twin(to->unsafe_storage().unsafeGetStorageImpl(), storage);
            } else {
                to->set_storage_keep_dtype(
                    storage_around(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage), true));
            }
            if (C10_UNLIKELY(to->storage_offset() != from->storage_offset() || to->sizes() != from->sizes() ||
                             to->strides() != from->strides())) {
                to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
            }
            if (plan_.is_ours) { // the ADInplaceOrView kernels of aten's ops count their writes
                TORCH_CHECK(!swapped.original.is_inference() || c10::InferenceMode::is_enabled(),
                            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a "
                            "clone to get a normal tensor before doing inplace update.");
                if (!swapped.original.is_inference()) {
                    to->bump_version();
                }
            }
        }
    }

    at::Tensor above(const at::Tensor &result) {
        if (!result.defined()) {
            return result;
        }
        c10::TensorImpl *const impl = result.unsafeGetTensorImpl();
        c10::StorageImpl *const storage = impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
        if (swapped_.size() > kSearched) {
            return above_of_many(result, impl, storage);
        }
        for (const Swapped &swapped : swapped_) {
            if (swapped.stand_in.unsafeGetTensorImpl() == impl) {
                return swapped.original;
            }
        }
        for (const Swapped &swapped : swapped_) {
            if (swapped.twin == storage) {
                return view_of(swapped, result);
            }
        }
        return from_result(result);
    }

    // infini kernels raise a message of their own on backward; infini results do so too.
    at::Tensor without_backward(at::Tensor result) {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("infini::_without_backward", "")
                                   .typed<at::Tensor(const at::Tensor &, const at::Tensor &, c10::string_view)>();
        std::string name = plan_.name.substr(8, plan_.name.find('.') - 8);
        for (const at::Tensor &x : followed_) {
            result = op.call(result, x, name);
        }
        return result;
    }

    bool is_followed() const { return !followed_.empty(); }

private:
    static constexpr size_t kSearched = 16; // up to this many, a search is faster than a table

    static at::Tensor view_of(const Swapped &swapped, const at::Tensor &result) {
        return from_view(result, swapped.original);
    }

    at::Tensor above_of_many(const at::Tensor &result, c10::TensorImpl *impl, c10::StorageImpl *storage) {
        if (table_.empty()) {
            for (const Swapped &swapped : swapped_) {
                table_.emplace(swapped.stand_in.unsafeGetTensorImpl(), &swapped);
                table_.emplace(swapped.twin, &swapped);
            }
        }
        if (const auto found = table_.find(impl); found != table_.end()) {
            return found->second->original;
        }
        if (const auto found = table_.find(storage); found != table_.end()) {
            return view_of(*found->second, result);
        }
        return from_result(result);
    }

    void watch(const at::Tensor &tensor, const at::Tensor &stand_in, const Slot &slot) {
        TORCH_CHECK(!tensor._fw_grad(0).defined(), plan_.name.substr(0, plan_.name.find('.')),
                    ": every tensor must be without a tangent, for the op has no forward-mode derivative (unpack the "
                    "primal with torch.autograd.forward_ad.unpack_dual), got argument ",
                    slot.index + 1, " with one");
        if (tensor.requires_grad() && at::GradMode::is_enabled()) {
            stand_in.unsafeGetTensorImpl()->set_requires_grad(true); // makes kernels that write raise
            followed_.push_back(tensor);
        }
    }

    const Plan &plan_;
    c10::SmallVector<Swapped, 6> swapped_;
    c10::SmallVector<at::Tensor, 1> followed_;
    std::unordered_map<const void *, const Swapped *> table_;
};

class OnTwins final : public c10::OperatorKernel {
public:
    explicit OnTwins(const OperatorHandle &op) : plan_(plan_of(op)) {}

    void operator()(const OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
        if (plan_.is_counted) {
            count();
        }
        Call call(plan_);
        swap(call, stack);
        const InVendorMemory results_there;
        run(op, stack);
        call.follow();
        give_back(call, stack);
    }

    const Plan &plan() const { return plan_; }
    std::atomic<int64_t> calls{0};

    // Counts a call that the backing device's kernel computes; warns or raises as the setting says.
    void count() {
        calls.fetch_add(1, std::memory_order_relaxed);
        const FallbackMode now = mode.load(std::memory_order_relaxed);
        if (C10_LIKELY(now == FallbackMode::allow)) {
            return;
        }
        TORCH_CHECK_NOT_IMPLEMENTED(now != FallbackMode::error, plan_.name,
                                    " has no kernel of infini, and torch_infini.device.fallback is \"error\": set it "
                                    "to \"allow\" to run torch's kernel for ",
                                    c10::Device(backing.type), ", or call an op of torch.ops.infini");
        if (!warned_.exchange(true)) {
            TORCH_WARN(plan_.name, " has no kernel of infini: ", plan_.is_ours ? "ours" : "torch's", " for ",
                       c10::Device(backing.type), " runs on the same memory");
        }
    }

private:
    void swap(Call &call, Stack *stack) const {
        IValue *const arguments = stack->data() + (stack->size() - plan_.arguments);
        for (const Slot &slot : plan_.slots) {
            IValue &value = arguments[slot.index];
            switch (slot.kind) {
            case Kind::tensor:
                if (value.isTensor()) {
                    value = call.below(std::move(value).toTensor(), slot, plan_.is_ours);
                }
                break;
            case Kind::tensors:
                if (!value.isNone()) {
                    c10::List<at::Tensor> swapped;
                    const auto given = value.toTensorList();
                    swapped.reserve(given.size());
                    for (size_t i = 0; i < given.size(); ++i) {
                        swapped.push_back(call.below(at::Tensor(given.get(i)), slot, plan_.is_ours));
                    }
                    value = std::move(swapped);
                }
                break;
            case Kind::optional_tensors:
                if (!value.isNone()) {
                    c10::List<std::optional<at::Tensor>> swapped;
                    const auto given = value.toOptionalTensorList();
                    swapped.reserve(given.size());
                    for (size_t i = 0; i < given.size(); ++i) {
                        std::optional<at::Tensor> tensor = given.get(i);
                        swapped.push_back(
                            tensor ? std::optional<at::Tensor>(call.below(std::move(*tensor), slot, plan_.is_ours))
                                   : std::nullopt);
                    }
                    value = std::move(swapped);
                }
                break;
            case Kind::device:
                if (value.isDevice() && value.toDevice().type() == kInfini) {
                    value = below(checked_index(value.toDevice()));
                }
                break;
            case Kind::generator:
                if (!value.isNone()) {
                    value = generator_below(value.toGenerator());
                } else if (backing.type == c10::kCPU) { // CUDA's default generators are infini's too
                    value = generator_below(std::nullopt);
                }
                break;
            }
        }
    }

    void run(const OperatorHandle &op, Stack *stack) const {
        try {
            if (plan_.is_aten) {
                const at::AutoDispatchBelowADInplaceOrView below_autograd;
                op.redispatchBoxed(c10::DispatchKeySet(backing.key), stack);
            } else if (!backing.is_vendors() ||
                       !plan_.is_ours) { // infini ops need the grad mode, and compute without aten
                op.redispatchBoxed(c10::DispatchKeySet(backing.key), stack);
            } else {
                run_by_vendor(op, stack);
            }
        } catch (const c10::OutOfMemoryError &) {
            throw;
        } catch (const c10::Error &error) {
            const std::string said = error.what_without_backtrace();
            if (said.find("DefaultCPUAllocator") != std::string::npos) { // contains the bytes requested
                out_of_memory(said, -1);
            }
            throw;
        }
    }

    // If the vendor has no kernel, the CPU's computes, and the call is counted.
    void run_by_vendor(const OperatorHandle &op, Stack *stack) const {
        class Scope {
        public:
            Scope() {
                const bool is_strict = mode.load(std::memory_order_relaxed) == FallbackMode::error;
                backing.compute_on(backing.vendor, is_strict, &count_missing);
            }
            ~Scope() { backing.compute_on(INFINI_DEVICE_CPU, false, nullptr); }
        };
        const Scope vendors;
        op.redispatchBoxed(c10::DispatchKeySet(backing.key), stack);
    }

    void give_back(Call &call, Stack *stack) const {
        IValue *const results = stack->data() + (stack->size() - plan_.returns);
        for (size_t i = 0; i < plan_.returns; ++i) {
            if (results[i].isTensor()) {
                at::Tensor result = call.above(results[i].toTensor());
                if (C10_UNLIKELY(call.is_followed()) && !plan_.writes) {
                    result = call.without_backward(std::move(result));
                }
                results[i] = std::move(result);
            } else if (results[i].isTensorList()) {
                c10::List<at::Tensor> given;
                const auto list = results[i].toTensorList();
                given.reserve(list.size());
                for (size_t k = 0; k < list.size(); ++k) {
                    given.push_back(call.above(list.get(k)));
                }
                results[i] = std::move(given);
            }
        }
    }

    const Plan plan_;
    std::atomic<bool> warned_{false};
};

// The registered kernels, for the report, and the fallback's, by op, for ops defined after start().
struct Kernels {
    std::mutex mutex;
    std::vector<OnTwins *> all;
    std::unordered_map<OperatorHandle, std::unique_ptr<OnTwins>> of_fallback;
};

Kernels &kernels() {
    static auto *made = new Kernels;
    return *made;
}

OnTwins &kernel_of(const OperatorHandle &op) {
    const std::lock_guard<std::mutex> lock(kernels().mutex);
    auto &kernel = kernels().of_fallback[op];
    if (!kernel) {
        kernel = std::make_unique<OnTwins>(op);
        kernels().all.push_back(kernel.get());
    }
    return *kernel;
}

void count_missing(const char *op) {
    OnTwins *missing = nullptr;
    {
        const std::lock_guard<std::mutex> lock(kernels().mutex);
        static auto *const by_name = new std::unordered_map<std::string, OnTwins *>;
        if (by_name->empty()) {
            for (OnTwins *kernel : kernels().all) {
                by_name->emplace(kernel->plan().name, kernel);
            }
        }
        missing = by_name->at(std::string("infini::") + op);
    }
    missing->count();
}

// Kernels for all devices that reject every device whose name they do not know.
bool asks_for_a_known_device(const c10::OperatorName &op) {
    return op.name == "aten::mode" && op.overload_name == "values";
}

void fall_back(const OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    kernel_of(op)(op, keys, stack);
}

} // namespace

void set_fallback_mode(FallbackMode now) {
    mode = now;
}

FallbackMode fallback_mode() {
    return mode;
}

std::vector<std::pair<std::string, int64_t>> fallback_counts(bool clear) {
    const std::lock_guard<std::mutex> lock(kernels().mutex);
    std::vector<std::pair<std::string, int64_t>> counts;
    for (OnTwins *kernel : kernels().all) {
        const int64_t calls = clear ? kernel->calls.exchange(0) : kernel->calls.load();
        if (calls != 0) {
            counts.emplace_back(kernel->plan().name, calls);
        }
    }
    return counts;
}

void register_fallbacks() {
    // Never destroyed: unregistering thousands of kernels at exit serves no purpose.
    static auto *libraries = new std::vector<torch::Library>;
    libraries->reserve(3);
    for (const char *name : {"aten", "infini"}) {
        libraries->emplace_back(torch::Library::IMPL, name, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
        torch::Library &library = libraries->back();
        const std::string prefix = std::string(name) + "::";
        for (const c10::OperatorName &op_name : c10::Dispatcher::singleton().getAllOpNames()) {
            if (op_name.name.rfind(prefix, 0) != 0 || has_own_kernel(op_name)) {
                continue;
            }
            const auto op = c10::Dispatcher::singleton().findSchema(op_name);
            const bool has_kernel =
                op && op->hasKernelForDispatchKey(backing.key) && !op->isKernelFallthroughKernel(backing.key);
            if (!has_kernel && !asks_for_a_known_device(op_name)) {
                continue;
            }
            auto kernel = std::make_unique<OnTwins>(*op);
            kernels().all.push_back(kernel.get());
            const std::string full = op_name.name + (op_name.overload_name.empty() ? "" : "." + op_name.overload_name);
            library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
        }
    }
    libraries->emplace_back(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    libraries->back().fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

} // namespace infini::device
