// torch.ops.infini.embedding_blocks, functional and out; declared in torch_infini/ops/embedding_blocks.py.
#include "../../torch/tensor.h"
#include "embedding_blocks.h"

#include "check.h"

namespace infini::embedding_blocks {
namespace {

using torch::headeronly::ScalarType;

constexpr Checker kRule("embedding_blocks");

const linear_blocks::Kind *kind_of(int64_t number) {
    const linear_blocks::Kind *const kind = linear_blocks::find_kind(number);
    if (kind == nullptr) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "kind", message("be one of ", linear_blocks::known_kinds()),
                   std::to_string(number));
    }
    return kind;
}

infiniDtype_t dtype_of(ScalarType dtype) {
    switch (dtype) {
    case ScalarType::Float:
        return INFINI_DTYPE_F32;
    case ScalarType::BFloat16:
        return INFINI_DTYPE_BF16;
    case ScalarType::Half:
        return INFINI_DTYPE_F16;
    default:
        kRule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "dtype", "be float32, bfloat16 or float16", "another");
    }
}

Args inputs(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t kind) {
    Args args;
    args.kind = kind_of(kind);
    args.ids = view(context, kRule, "ids", ids);
    args.weight = view(context, kRule, "weight", weight);
    check_inputs(args);
    return args;
}

Tensor embedding_blocks(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t kind,
                        ScalarType dtype) {
    Args args = inputs(context, ids, weight, kind);
    const infiniDtype_t of_out = dtype_of(dtype);
    Tensor out = empty(context, {args.ids.size(0), args.weight.size(1) * args.kind->elements}, of_out);
    args.out = view(context, kRule, "out", out);
    run(context, args);
    return out;
}

Tensor embedding_blocks_out(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t kind,
                            ScalarType dtype, Tensor out) {
    Args args = inputs(context, ids, weight, kind);
    args.out = view(context, kRule, "out", out);
    check_output(args);
    if (args.out.dtype != dtype_of(dtype)) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "out", "have the dtype that dtype names", "another");
    }
    run(context, args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("embedding_blocks", INFINI_BOX(embedding_blocks));
    m.impl("embedding_blocks.out", INFINI_BOX(embedding_blocks_out));
}

} // namespace infini::embedding_blocks
