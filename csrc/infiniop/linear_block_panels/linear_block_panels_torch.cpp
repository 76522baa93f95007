// torch.ops.infini.linear_block_panels, functional and out, and pack_blocks and unpack_blocks, which write into an
// argument; declared in torch_infini/ops.
#include "../../torch/tensor.h"
#include "check.h"
#include "linear_block_panels.h"

#include <optional>

namespace infini::linear_block_panels {
namespace {

constexpr Checker kRule("linear_block_panels"), kPack("pack_blocks"), kUnpack("unpack_blocks");

template <typename AnyArgs> void set_kind(const Checker &rule, int64_t number, AnyArgs &args) {
    args.kind = find_panel_kind(number);
    if (args.kind == nullptr) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "kind", message("be one of ", known_panel_kinds()), std::to_string(number));
    }
    args.block = linear_blocks::find_kind(number);
}

Args inputs(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
            const std::optional<Tensor> &bias) {
    Args args;
    set_kind(kRule, kind, args);
    args.x = view(context, kRule, "x", x);
    args.weight = view(context, kRule, "weight", weight);
    args.bias = optional_view(context, kRule, "bias", bias);
    check_inputs(args);
    return args;
}

// Computes, after allocating the workspace that the call needs.
void run_with_workspace(const ExecutionContext &context, Args args) {
    const size_t bytes = workspace_size(context, args);
    if (bytes == 0) {
        return run(context, args);
    }
    const Tensor workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    run(context, args);
}

Tensor linear_block_panels(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
                           const std::optional<Tensor> &bias) {
    Args args = inputs(context, x, weight, kind, bias);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.weight.size(0) * kPanel;
    Tensor y = empty_like(context, args.y);
    args.y = view(context, kRule, "out", y);
    run_with_workspace(context, args);
    return y;
}

Tensor linear_block_panels_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
                               const std::optional<Tensor> &bias, Tensor out) {
    Args args = inputs(context, x, weight, kind, bias);
    args.y = view(context, kRule, "out", out);
    check_output(args);
    run_with_workspace(context, args);
    return out;
}

PackArgs pack_args(const ExecutionContext &context, const Checker &rule, const Tensor &packed, const Tensor &weight,
                   int64_t kind, int64_t first_row) {
    PackArgs args;
    set_kind(rule, kind, args);
    args.packed = view(context, rule, "packed", packed);
    args.weight = view(context, rule, "weight", weight);
    args.first_row = first_row;
    return args;
}

void pack_blocks(const ExecutionContext &context, Tensor packed, const Tensor &weight, int64_t kind,
                 int64_t first_row) {
    run_pack(context, pack_args(context, kPack, packed, weight, kind, first_row));
}

void unpack_blocks(const ExecutionContext &context, Tensor weight, const Tensor &packed, int64_t kind,
                   int64_t first_row) {
    run_unpack(context, pack_args(context, kUnpack, packed, weight, kind, first_row));
}

} // namespace

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("linear_block_panels", INFINI_BOX(linear_block_panels));
    m.impl("linear_block_panels.out", INFINI_BOX(linear_block_panels_out));
    m.impl("pack_blocks", INFINI_BOX(pack_blocks));
    m.impl("unpack_blocks", INFINI_BOX(unpack_blocks));
}

} // namespace infini::linear_block_panels
