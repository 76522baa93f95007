// ATen's products (oneDNN, MKL) for gemm/library.h, and the C functions that torch_infini/tune.py sets the table with.
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

// A matrix, or a batch of `size` matrices; a batch of one is expanded.
Tensor matrices_of(TensorView view, int64_t size) {
    if (view.ndim == 3 && size == 1) {
        std::copy(view.shape + 1, view.shape + 3, view.shape);
        std::copy(view.strides + 1, view.strides + 3, view.strides);
        view.ndim = 2;
    } else if (view.ndim == 3 && view.shape[0] == 1) {
        view.shape[0] = size;
        view.strides[0] = 0;
    }
    return tensor_of(ExecutionContext{}, view);
}

// Calls an operator whose last argument is written.
template <typename... Arguments> void call(const char *name, const Arguments &...arguments) {
    std::array stack{torch::stable::detail::from(arguments)...};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference to the result, which we own
}

void multiply(const gemm::Args &args, const TensorView &bias) {
    if (bias.dtype != INFINI_DTYPE_INVALID) {
        TensorView weight = args.b; // transposed below
        std::swap(weight.shape[0], weight.shape[1]);
        std::swap(weight.strides[0], weight.strides[1]);
        return call("aten::linear", tensor_of(ExecutionContext{}, args.a), tensor_of(ExecutionContext{}, weight),
                    std::optional(tensor_of(ExecutionContext{}, bias)), tensor_of(ExecutionContext{}, args.c));
    }
    const int64_t size = args.c.ndim == 3 ? args.c.shape[0] : 1;
    call(size > 1 ? "aten::bmm" : "aten::mm", matrices_of(args.a, size), matrices_of(args.b, size),
         matrices_of(args.c, size));
}

} // namespace

ExecutionContext cpu_context() {
    ExecutionContext context;
    context.library = multiply;
    return context;
}

} // namespace infini

extern "C" {

// The number of rows from which a library computes linear's products (0), matmul's (1), batches (2) or conv's (3, 4) of
// a dtype; INT64_MAX: never. Returns -1 on error; infiniGetLastErrorMessage() has its message.
INFINI_API int64_t infiniTorchLibraryFrom(int products, infiniDtype_t dtype) {
    int64_t from = -1;
    infini::guarded([&] { from = infini::gemm::library_from(static_cast<infini::gemm::Products>(products), dtype); });
    return from;
}

// The number of rows from which on it no longer does.
INFINI_API int64_t infiniTorchLibraryBelow(int products, infiniDtype_t dtype) {
    int64_t below = -1;
    infini::guarded([&] { below = infini::gemm::library_below(static_cast<infini::gemm::Products>(products), dtype); });
    return below;
}

// Overrides the number of rows; 0 restores the value of the built-in table.
INFINI_API infiniStatus_t infiniTorchSetLibraryFrom(int products, infiniDtype_t dtype, int64_t size) {
    return infini::guarded(
        [&] { infini::gemm::set_library_from(static_cast<infini::gemm::Products>(products), dtype, size); });
}
}
