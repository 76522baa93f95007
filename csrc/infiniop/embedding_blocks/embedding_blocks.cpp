// The rules of embedding_blocks, and its loop over ids: each row is decoded by linear_blocks' kernel, from a copy if it
// lies in a panel.
#include "embedding_blocks.h"

#include <vector>

#include "check.h"
#include "linear_block_panels/linear_block_panels.h"
#include "linear_blocks/linear_blocks.h"

namespace infini::embedding_blocks {

KernelTable<Args> kernels{"embedding_blocks"};

namespace {

constexpr Checker kRule("embedding_blocks");

int64_t id_at(const TensorView &ids, int64_t i) {
    const int64_t at = i * ids.stride(0);
    return ids.dtype == INFINI_DTYPE_I64 ? ids.as<const int64_t>()[at] : ids.as<const int32_t>()[at];
}

using linear_block_panels::kPanel;

bool in_panels(const Args &args) {
    return args.weight.size(2) == kPanel * args.kind->bytes;
}

// Rows of the table.
int64_t table_rows(const Args &args) {
    return args.weight.size(0) * (in_panels(args) ? kPanel : 1);
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    const int64_t count = args.ids.size(0), rows = table_rows(args);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = id_at(args.ids, i);
        if (id < 0 || id >= rows) {
            kRule.fail(INFINI_STATUS_BAD_PARAM, "ids",
                       message("be at least 0 and less than ", rows, ", the number of rows of weight"),
                       message(id, " at ids[", i, "]"));
        }
    }
    if (args.out.numel() == 0) {
        return;
    }
    linear_blocks::UnpackArgs row{args.weight, args.out, args.kind};
    row.weight.shape[0] = row.to.shape[0] = 1;
    row.weight.shape[2] = row.weight.strides[1] = args.kind->bytes;
    const bool panels = in_panels(args);
    std::vector<uint8_t> copy(panels ? static_cast<size_t>(args.weight.size(1) * args.kind->bytes) : 0);
    const int64_t bytes = args.out.stride(0) * static_cast<int64_t>(size_of(args.out.dtype));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = id_at(args.ids, i);
        row.weight.data = panels ? copy.data() : args.weight.as<uint8_t>() + id * args.weight.stride(0);
        if (panels) {
            linear_block_panels::unpack_kernel(context, {args.weight, row.weight, id, args.kind,
                                                         linear_block_panels::find_panel_kind(args.kind->number)});
        }
        row.to.data = args.out.as<char>() + i * bytes;
        linear_blocks::unpack_kernel(context, row);
    }
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};

} // namespace

void check_inputs(const Args &args) {
    const TensorView &ids = args.ids, &weight = args.weight;
    kRule.rank("ids", ids, 1);
    kRule.dtype("ids", ids, INFINI_INDICES);
    kRule.rank("weight", weight, 3);
    kRule.dtype("weight", weight, {INFINI_DTYPE_U8});
    if (in_panels(args)) {
        kRule.contiguous("weight", weight);
        if (linear_block_panels::find_panel_kind(args.kind->number) == nullptr) {
            kRule.fail(INFINI_STATUS_BAD_PARAM, "kind",
                       message("be one of ", linear_block_panels::known_panel_kinds(), " for a weight in panels"),
                       std::to_string(args.kind->number));
        }
        return;
    }
    kRule.shape("weight", weight, {weight.size(0), weight.size(1), args.kind->bytes}, "to match the kind of block");
    if (weight.numel() > 0 && (weight.stride(2) != 1 || (weight.size(1) > 1 && weight.stride(1) != args.kind->bytes))) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, "weight",
                   "have the blocks of a row adjacent (call .contiguous() on it)",
                   message("strides ", strides_of(weight)));
    }
}

void check_output(const Args &args) {
    const TensorView &out = args.out;
    kRule.rank("out", out, 2);
    kRule.dtype("out", out, INFINI_FLOATS);
    kRule.shape("out", out, {args.ids.size(0), args.weight.size(1) * args.kind->elements},
                "to match ids and a row of weight");
    kRule.dense_last("out", out);
    kRule.writable("out", out);
    kRule.no_overlap("out", out, "ids", args.ids);
    kRule.no_overlap("out", out, "weight", args.weight);
}

void run(const ExecutionContext &context, const Args &args) {
    kernels.run(context, args);
}

} // namespace infini::embedding_blocks
