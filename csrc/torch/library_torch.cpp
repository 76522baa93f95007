// ATen's products (oneDNN, MKL) for gemm/library.h, and the C functions by which torch_infini/tune.py sets the table.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "gemm/library.h"
#include "guard.h"
#include "tensor.h"

#include <torch/csrc/stable/ops.h>

namespace infini {
namespace {

// The matrix, or matrix i of a batch of them.
Tensor matrix_of(TensorView view, int64_t i) {
    const int first = view.ndim - 2;
    if (first > 0 && view.shape[0] > 1) {
        view.data = view.as<char>() + i * view.strides[0] * static_cast<int64_t>(size_of(view.dtype));
    }
    std::copy(view.shape + first, view.shape + view.ndim, view.shape);
    std::copy(view.strides + first, view.strides + view.ndim, view.strides);
    view.ndim = 2;
    return tensor_of(view);
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
        return call("aten::linear", tensor_of(args.a), tensor_of(weight), std::optional(tensor_of(bias)),
                    tensor_of(args.c));
    }
    for (int64_t i = 0; i < (args.c.ndim == 3 ? args.c.shape[0] : 1); ++i) {
        call("aten::mm", matrix_of(args.a, i), matrix_of(args.b, i), matrix_of(args.c, i));
    }
}

[[maybe_unused]] const bool offered = (gemm::set_library(multiply), true);

} // namespace

} // namespace infini

extern "C" {

// From how many rows on a library computes linear's products (0), matmul's (1), conv's (2, 3) of a dtype; INT64_MAX: never. -1: a
// mistake, which infiniGetLastErrorMessage() tells.
INFINI_API int64_t infiniTorchLibraryFrom(int products, infiniDtype_t dtype) {
    int64_t from = -1;
    infini::guarded([&] { from = infini::gemm::library_from(static_cast<infini::gemm::Products>(products), dtype); });
    return from;
}

// Below how many.
INFINI_API int64_t infiniTorchLibraryBelow(int products, infiniDtype_t dtype) {
    int64_t below = -1;
    infini::guarded([&] { below = infini::gemm::library_below(static_cast<infini::gemm::Products>(products), dtype); });
    return below;
}

// Sets it; 0: what the table of the sources says.
INFINI_API infiniStatus_t infiniTorchSetLibraryFrom(int products, infiniDtype_t dtype, int64_t size) {
    return infini::guarded(
        [&] { infini::gemm::set_library_from(static_cast<infini::gemm::Products>(products), dtype, size); });
}
}
