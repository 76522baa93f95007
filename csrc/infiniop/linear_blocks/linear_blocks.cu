// linear_blocks on CUDA: the kind's kernel for up to 8 rows of x; beyond, dense products with slices of the weight that
// are decoded to the workspace in the dtype of x.
// Limit of many rows: the dense product; decoding a slice writes and reads 2 to 4 bytes of each element.
#include <algorithm>
#include <map>

#include "kinds_on_cuda.h"
#include "linear/linear.h"
#include "slices.h"
#include "status.h"

namespace infini::linear_blocks {
namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kSliceBytes = 64 << 20; // of a decoded slice, or 64 rows

// In a function: sources may register before this one's constants are made.
std::map<int64_t, KindOnCuda> &kinds() {
    static std::map<int64_t, KindOnCuda> all;
    return all;
}

bool in_slices(const Args &args) {
    return args.x.size(-1) > 0 && args.y.numel() / args.weight.size(0) > kFewRows;
}

constexpr size_t kAlignment = 256;

size_t decoded_bytes(const Args &args) {
    return (slice_bytes(args, kSliceBytes) + kAlignment - 1) / kAlignment * kAlignment;
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    const KindOnCuda &kind = kind_on_cuda("linear_blocks", *args.kind);
    if (!in_slices(args)) {
        return kind.multiply(context, args);
    }
    for_each_slice(args, kSliceBytes, [&](const TensorView &weight, const TensorView &dense, linear::Args &product) {
        kind.decode(context, {weight, dense, {}});
        product.workspace = static_cast<char *>(args.workspace) + decoded_bytes(args);
        linear::run(context, product);
    });
}

size_t workspace_on_cuda(const ExecutionContext &context, const Args &args) {
    if (!in_slices(args)) {
        return 0;
    }
    size_t most = 0;
    for_each_slice(args, kSliceBytes, [&](const TensorView &, const TensorView &, linear::Args &product) {
        most = std::max(most, linear::workspace_bytes(context, product));
    });
    return decoded_bytes(args) + most;
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace

RegisteredKindOnCuda::RegisteredKindOnCuda(const KindOnCuda &kind) {
    kinds().emplace(kind.number, kind);
}

const KindOnCuda &kind_on_cuda(const char *op, const Kind &kind) {
    const auto found = kinds().find(kind.number);
    if (found == kinds().end()) {
        throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                    message("infini::", op, ": kind must be one that has a CUDA kernel, got ", kind.number, " (",
                            kind.name, ")"));
    }
    return found->second;
}

} // namespace infini::linear_blocks
