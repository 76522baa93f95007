// infiniopRoPE: rope with positions, over all columns of a head.
#include "c_api.h"
#include "check.h"
#include "rope.h"

namespace {

using namespace infini;
using rope::Args;

void check(const Args &args) {
    constexpr Checker rule("rope");
    rope::check("rope", args);
    const int64_t columns = args.x.size(-1), pairs = args.cos.size(-1);
    if (columns % 2 != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x", "have an even number of columns",
                  message(columns, " (shape ", shape_of(args.x), ")"));
    }
    if (2 * pairs != columns) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "cos",
                  message("have ", columns / 2, " columns, half the last dimension of x"),
                  message(pairs, " (shape ", shape_of(args.cos), ")"));
    }
}

constexpr c_api::COp<Args> kOp("RoPE", rope::kernels, check, [](const ExecutionContext &context, const Args &args) {
    rope::run(context, "rope", args);
});

} // namespace

infiniStatus_t infiniopCreateRoPEDescriptor(infiniopHandle_t handle, infiniopRoPEDescriptor_t *desc_ptr,
                                            infiniopTensorDescriptor_t y_desc, infiniopTensorDescriptor_t x_desc,
                                            infiniopTensorDescriptor_t pos_ids_desc,
                                            infiniopTensorDescriptor_t sin_table_desc,
                                            infiniopTensorDescriptor_t cos_table_desc, infiniopRoPEAlgo_t algo) {
    return kOp.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.y = tensor("y_desc", y_desc);
        args.x = tensor("x_desc", x_desc);
        args.positions = tensor("pos_ids_desc", pos_ids_desc);
        args.sin = tensor("sin_table_desc", sin_table_desc);
        args.cos = tensor("cos_table_desc", cos_table_desc);
        const auto number = static_cast<int>(algo);
        if (number != INFINIOP_ROPE_ALGO_GPT_J && number != INFINIOP_ROPE_ALGO_GPT_NEOX) {
            throw Error(INFINI_STATUS_BAD_PARAM,
                        message(tensor.function(), ": algo must be 0 (GPT_J) or 1 (GPT_NEOX), got ", number));
        }
        args.interleaved = number == INFINIOP_ROPE_ALGO_GPT_J;
    });
}

INFINIOP_WORKSPACE_SIZE(RoPE, kOp)

infiniStatus_t infiniopRoPE(infiniopRoPEDescriptor_t desc, void *workspace, size_t workspace_size, void *y,
                            const void *x, const void *pos_ids, const void *sin_table, const void *cos_table,
                            void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.y, "y", y);
        memory(args.x, "x", x);
        memory(args.positions, "pos_ids", pos_ids);
        memory(args.sin, "sin_table", sin_table);
        memory(args.cos, "cos_table", cos_table);
    });
}

INFINIOP_DESTROY(RoPE, kOp)
