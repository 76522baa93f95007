// ATen's products (oneDNN, MKL) for gemm/library.h, and the C functions by which torch_infini/tune.py sets the table.
#include <array>
#include <optional>
#include <utility>

#include "gemm/library.h"
#include "guard.h"
#include "tensor.h"

#include <torch/csrc/stable/ops.h>

namespace infini {
namespace {

torch::headeronly::ScalarType torch_type(infiniDtype_t dtype) {
    using torch::headeronly::ScalarType;
    return dtype == INFINI_DTYPE_F32    ? ScalarType::Float
           : dtype == INFINI_DTYPE_BF16 ? ScalarType::BFloat16
                                        : ScalarType::Half;
}

// A tensor of the view's memory: its last `dims` dimensions, of entry `entry` of a batch.
Tensor tensor_of(const TensorView &view, int dims, int64_t entry = 0) {
    const int first = view.ndim - dims;
    const int64_t offset = first > 0 && view.shape[0] > 1 ? entry * view.strides[0] : 0;
    const auto count = static_cast<size_t>(dims);
    return torch::stable::from_blob(view.as<char>() + offset * static_cast<int64_t>(size_of(view.dtype)),
                                    {view.shape + first, count}, {view.strides + first, count},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), torch_type(view.dtype));
}

// Calls an operator that writes its last argument.
template <typename... Arguments> void call(const char *name, const Arguments &...arguments) {
    std::array stack{torch::stable::detail::from(arguments)...};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]); // a reference to it, which is ours
}

void multiply(const gemm::Args &args, const TensorView &bias) {
    if (bias.dtype != INFINI_DTYPE_INVALID) {
        TensorView weight = args.b; // transposed
        std::swap(weight.shape[0], weight.shape[1]);
        std::swap(weight.strides[0], weight.strides[1]);
        return call("aten::linear", tensor_of(args.a, 2), tensor_of(weight, 2), std::optional(tensor_of(bias, 1)),
                    tensor_of(args.c, 2));
    }
    for (int64_t i = 0; i < (args.c.ndim == 3 ? args.c.shape[0] : 1); ++i) {
        call("aten::mm", tensor_of(args.a, 2, i), tensor_of(args.b, 2, i), tensor_of(args.c, 2, i));
    }
}

[[maybe_unused]] const bool offered = (gemm::set_library(multiply), true);

} // namespace
} // namespace infini

extern "C" {

// From how many rows on a library computes linear's products (0) or matmul's (1) of a dtype; INT64_MAX: never. -1: a
// mistake, which infiniGetLastErrorMessage() tells.
INFINI_API int64_t infiniTorchLibraryFrom(int products, infiniDtype_t dtype) {
    int64_t from = -1;
    infini::guarded([&] { from = infini::gemm::library_from(static_cast<infini::gemm::Products>(products), dtype); });
    return from;
}

// Sets it; 0: what the table of the sources says.
INFINI_API infiniStatus_t infiniTorchSetLibraryFrom(int products, infiniDtype_t dtype, int64_t size) {
    return infini::guarded(
        [&] { infini::gemm::set_library_from(static_cast<infini::gemm::Products>(products), dtype, size); });
}
}
