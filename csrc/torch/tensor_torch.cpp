// TensorViews of torch tensors and new torch tensors, through the C shim of the stable ABI.
#include "new_output.h"
#include "tensor.h"

#include <dlfcn.h>

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "rms_norm/rms_norm.h"

// Defined in the emulated libinfinirt.
extern "C" __attribute__((weak)) void *infinirtEmulatedTorchStream();

namespace infini {

namespace {

using CurrentStream = AOTITorchError (*)(int32_t device_index, void **stream);

// torch's function for its current stream; nullptr if this process's torch has no CUDA. Looked up instead of linked, so
// that one build works with both.
CurrentStream torch_current_stream() {
    static const auto function = [] {
        constexpr const char *name = "aoti_torch_get_current_cuda_stream";
        void *found = dlsym(RTLD_DEFAULT, name);
        if (found == nullptr) { // Python loads extension modules, and so torch, with local symbols
            void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
            found = library == nullptr ? nullptr : dlsym(library, name);
        }
        return reinterpret_cast<CurrentStream>(found);
    }();
    return function;
}

} // namespace

bool has_cuda() {
    // A build without CUDA has registered no kernels. Emulated kernels compute in host memory, not on a GPU.
    return rms_norm::kernels.has(INFINI_DEVICE_NVIDIA) && !cuda_is_emulated() && torch_current_stream() != nullptr;
}

CudaCall::CudaCall(const Tensor *first) {
    context_.device_type = INFINI_DEVICE_NVIDIA;
    if (cuda_is_emulated()) {
        context_.stream = infinirtEmulatedTorchStream();
    } else {
        if (first == nullptr) { // the op has no tensor arguments, or lists of tensors
            throw Error(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED,
                        "infini: one argument of a call on CUDA must be a CUDA tensor, got none");
        }
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(first->get(), &context_.device_id));
        int32_t current = -1;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
        if (current != context_.device_id) {
            TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(context_.device_id, &guard_));
        }
        TORCH_ERROR_CODE_CHECK(torch_current_stream()(context_.device_id, &context_.stream));
    }
}

CudaCall::~CudaCall() {
    if (guard_ != nullptr) {
        aoti_torch_delete_device_guard(guard_);
    }
}

namespace {

// Returns INFINI_DTYPE_INVALID for quantized types and types smaller than a byte.
infiniDtype_t dtype_of(torch::headeronly::ScalarType type) {
    using torch::headeronly::ScalarType;
    switch (type) {
    case ScalarType::Float:
        return INFINI_DTYPE_F32;
    case ScalarType::BFloat16:
        return INFINI_DTYPE_BF16;
    case ScalarType::Half:
        return INFINI_DTYPE_F16;
    case ScalarType::Double:
        return INFINI_DTYPE_F64;
    case ScalarType::Bool:
        return INFINI_DTYPE_BOOL;
    case ScalarType::Byte:
        return INFINI_DTYPE_U8;
    case ScalarType::Char:
        return INFINI_DTYPE_I8;
    case ScalarType::Short:
        return INFINI_DTYPE_I16;
    case ScalarType::Int:
        return INFINI_DTYPE_I32;
    case ScalarType::Long:
        return INFINI_DTYPE_I64;
    case ScalarType::UInt16:
        return INFINI_DTYPE_U16;
    case ScalarType::UInt32:
        return INFINI_DTYPE_U32;
    case ScalarType::UInt64:
        return INFINI_DTYPE_U64;
    case ScalarType::ComplexHalf:
        return INFINI_DTYPE_C32;
    case ScalarType::ComplexFloat:
        return INFINI_DTYPE_C64;
    case ScalarType::ComplexDouble:
        return INFINI_DTYPE_C128;
    case ScalarType::Float8_e5m2:
        return kFloat8E5M2;
    case ScalarType::Float8_e5m2fnuz:
        return kFloat8E5M2FNUZ;
    case ScalarType::Float8_e4m3fn:
        return kFloat8E4M3FN;
    case ScalarType::Float8_e4m3fnuz:
        return kFloat8E4M3FNUZ;
    default:
        return INFINI_DTYPE_INVALID;
    }
}

// The name in Python.
const char *torch_name_of(torch::headeronly::ScalarType type) {
    using torch::headeronly::ScalarType;
    switch (type) {
    case ScalarType::Float8_e8m0fnu:
        return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2:
        return "float4_e2m1fn_x2";
    default: // toString(): the quantized and the sub-byte types
        return dtype_of(type) != INFINI_DTYPE_INVALID ? name_of(dtype_of(type)) : torch::headeronly::toString(type);
    }
}

[[noreturn]] void refuse_dtype(const Checker &rule, const char *argument, const Tensor &tensor) {
    rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, argument,
              "be float64, float32, bfloat16, float16, bool or an integer of 8 to 64 bits",
              torch_name_of(tensor.scalar_type()));
}

int32_t device_index(const Tensor &tensor) {
    int32_t index = -1;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
    return index;
}

std::string device_name(const Tensor &tensor) {
    int32_t type = -1;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type == aoti_torch_device_type_cuda()   ? message("cuda:", device_index(tensor))
           : type == aoti_torch_device_type_cpu()  ? "cpu"
           : type == aoti_torch_device_type_meta() ? "meta"
                                                   : "another";
}

bool uses_cuda_memory(const ExecutionContext &context) {
    return context.device_type == INFINI_DEVICE_NVIDIA && !cuda_is_emulated();
}

bool is_here(const ExecutionContext &context, const Tensor &tensor) {
    return uses_cuda_memory(context) ? tensor.is_cuda() && device_index(tensor) == context.device_id : tensor.is_cpu();
}

} // namespace

TensorView view(const ExecutionContext &context, const Checker &rule, const char *argument, const Tensor &tensor) {
    TensorView view;
    if (!tensor.defined()) {
        rule.fail(INFINI_STATUS_NULL_POINTER, argument, "be a tensor", "None");
    }
    if (!is_here(context, tensor)) {
        const std::string here = uses_cuda_memory(context) ? message("cuda:", context.device_id) : "cpu";
        rule.fail(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED, argument,
                  message("be on the device of the other arguments, ", here), device_name(tensor));
    }
    view.dtype = dtype_of(tensor.scalar_type());
    if (view.dtype == INFINI_DTYPE_INVALID) {
        refuse_dtype(rule, argument, tensor);
    }
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    view.ndim = static_cast<int>(sizes.size());
    if (view.ndim > kMaxDims) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, argument, message("have at most ", kMaxDims, " dimensions"),
                  message(view.ndim));
    }
    view.data = tensor.data_ptr();
    for (int i = 0; i < view.ndim; ++i) {
        view.shape[i] = sizes[i];
        view.strides[i] = strides[i];
    }
    // The tensor's storage has been freed, as sharded training does.
    if (view.data == nullptr && view.numel() > 0) {
        rule.fail(INFINI_STATUS_NULL_POINTER, argument, "have its memory allocated",
                  message("shape ", shape_of(view), " without any"));
    }
    return view;
}

TensorView view_of_numbers(const ExecutionContext &context, const Checker &rule, const char *argument,
                           const Tensor &tensor) {
    const TensorView any = view(context, rule, argument, tensor);
    switch (any.dtype) {
    case INFINI_DTYPE_F64:
    case INFINI_DTYPE_F32:
    case INFINI_DTYPE_BF16:
    case INFINI_DTYPE_F16:
    case INFINI_DTYPE_BOOL:
    case INFINI_DTYPE_U8:
    case INFINI_DTYPE_I8:
    case INFINI_DTYPE_I16:
    case INFINI_DTYPE_I32:
    case INFINI_DTYPE_I64:
        return any;
    default:
        refuse_dtype(rule, argument, tensor);
    }
}

namespace {

int32_t torch_number_of(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_F32:
        return aoti_torch_dtype_float32();
    case INFINI_DTYPE_BF16:
        return aoti_torch_dtype_bfloat16();
    case INFINI_DTYPE_F16:
        return aoti_torch_dtype_float16();
    case INFINI_DTYPE_F64:
        return aoti_torch_dtype_float64();
    case INFINI_DTYPE_I64:
        return aoti_torch_dtype_int64();
    case INFINI_DTYPE_I32:
        return aoti_torch_dtype_int32();
    case INFINI_DTYPE_I16:
        return aoti_torch_dtype_int16();
    case INFINI_DTYPE_I8:
        return aoti_torch_dtype_int8();
    case INFINI_DTYPE_U8:
        return aoti_torch_dtype_uint8();
    case INFINI_DTYPE_BOOL:
        return aoti_torch_dtype_bool();
    // Ops that check their arguments after creating an output get here.
    case INFINI_DTYPE_U16:
        return aoti_torch_dtype_uint16();
    case INFINI_DTYPE_U32:
        return aoti_torch_dtype_uint32();
    case INFINI_DTYPE_U64:
        return aoti_torch_dtype_uint64();
    case INFINI_DTYPE_C32:
        return aoti_torch_dtype_complex32();
    case INFINI_DTYPE_C64:
        return aoti_torch_dtype_complex64();
    case INFINI_DTYPE_C128:
        return aoti_torch_dtype_complex128();
    default:
        if (dtype == kFloat8E5M2) {
            return aoti_torch_dtype_float8_e5m2();
        }
        if (dtype == kFloat8E5M2FNUZ) {
            return aoti_torch_dtype_float8_e5m2fnuz();
        }
        if (dtype == kFloat8E4M3FN) {
            return aoti_torch_dtype_float8_e4m3fn();
        }
        if (dtype == kFloat8E4M3FNUZ) {
            return aoti_torch_dtype_float8_e4m3fnuz();
        }
        throw Error(INFINI_STATUS_INTERNAL_ERROR, message("infini: no output can be made in ", name_of(dtype)));
    }
}

Tensor contiguous(const ExecutionContext &context, const int64_t *shape, int ndim, infiniDtype_t dtype) {
    int64_t strides[kMaxDims];
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
        strides[i] = step;
        step *= shape[i] > 1 ? shape[i] : 1; // torch's own rule for dimensions of size 0
    }
    AtenTensorHandle handle = nullptr;
    const int32_t device = uses_cuda_memory(context) ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    if (aoti_torch_empty_strided(ndim, shape, strides, torch_number_of(dtype), device, context.device_id, &handle)) {
        TensorView wanted;
        wanted.ndim = ndim;
        wanted.dtype = dtype;
        std::copy_n(shape, ndim, wanted.shape);
        double bytes = static_cast<double>(size_of(dtype)); // a double, because more than 2^63 bytes may be asked for
        for (int i = 0; i < ndim; ++i) {
            bytes *= static_cast<double>(shape[i]);
        }
        throw Error(INFINI_STATUS_INTERNAL_ERROR,
                    message("infini::", op_of(current_call.name), ": out of memory: a tensor of shape ",
                            shape_of(wanted), " in ", name_of(dtype), " takes ", bytes / (1 << 30), " GiB"));
    }
    const Tensor made(handle);
    cpu::note_new_output(made.data_ptr());
    if (cuda_is_emulated() && infinirtEmulatedTorchStream() != nullptr) {
        // Tensors made during a capture are kept for the replays, as in torch's own graphs.
        static auto *const kept = new std::vector<Tensor>;
        kept->push_back(made);
    }
    return made;
}

} // namespace

Tensor tensor_of(const ExecutionContext &context, const TensorView &view) {
    using torch::headeronly::DeviceType;
    using torch::headeronly::ScalarType;
    const ScalarType type = view.dtype == INFINI_DTYPE_F32    ? ScalarType::Float
                            : view.dtype == INFINI_DTYPE_BF16 ? ScalarType::BFloat16
                                                              : ScalarType::Half;
    const torch::stable::Device device = uses_cuda_memory(context)
                                             ? torch::stable::Device(DeviceType::CUDA, context.device_id)
                                             : torch::stable::Device(DeviceType::CPU);
    const auto dims = static_cast<size_t>(view.ndim);
    return torch::stable::from_blob(view.data, {view.shape, dims}, {view.strides, dims}, device, type);
}

Tensor empty(const ExecutionContext &context, std::initializer_list<int64_t> shape, infiniDtype_t dtype) {
    return contiguous(context, shape.begin(), static_cast<int>(shape.size()), dtype);
}

Tensor empty_like(const ExecutionContext &context, const TensorView &like) {
    return contiguous(context, like.shape, like.ndim, like.dtype);
}

Tensor empty_like(const ExecutionContext &context, const TensorView &like, infiniDtype_t dtype) {
    return contiguous(context, like.shape, like.ndim, dtype);
}

} // namespace infini
