// embedding_blocks on CUDA: the kind's decoder (linear_blocks). Ids out of range give rows of NaN.
// Limit: memory bandwidth, each row's blocks read once and its elements written once.
#include "check.h"
#include "embedding_blocks.h"
#include "indices.h"
#include "linear_blocks/kinds_on_cuda.h"

namespace infini::embedding_blocks {
namespace {

constexpr Checker kRule("embedding_blocks");

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    if (args.weight.size(2) != args.kind->bytes) {
        kRule.fail(INFINI_STATUS_NOT_IMPLEMENTED, "weight", "be in rows of blocks on CUDA", "panels");
    }
    if (args.out.numel() > 0) {
        linear_blocks::kind_on_cuda("embedding_blocks", *args.kind)
            .decode(context, {args.weight, args.out, Indices(args.ids)});
    }
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::embedding_blocks
