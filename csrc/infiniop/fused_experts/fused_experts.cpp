// The rules of fused_experts, and its kernel on the CPU: tokens are sorted by expert, and each expert's are multiplied
// by the kernels of linear, of gemm, or of linear's quantized kinds.
// Limit: for few tokens the memory bandwidth of the chosen experts' weights, for many the multiply-add units.
#include "fused_experts.h"

#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "check.h"
#include "gemm/gemm.h"
#include "gemm/library.h"
#include "indices.h"
#include "linear/linear.h"
#include "linear_block_panels/linear_block_panels.h"
#include "linear_blocks/linear_blocks.h"
#include "linear_group8/linear_group8.h"
#include "linear_table4/linear_table4.h"

namespace infini::fused_experts {

KernelTable<Args> kernels{"fused_experts"};

namespace {

using linear_block_panels::kPanel;

constexpr Checker kRule("fused_experts");

// So many tokens are computed at a time: results of up to k experts are held for each.
constexpr int64_t kMaxTokens = 1024;

constexpr int64_t kAlignment = 256; // as linear_blocks wants its workspace

class Buffer {
public:
    explicit Buffer(int64_t bytes) : data_(::operator new(static_cast<size_t>(bytes), std::align_val_t{kAlignment})) {}
    ~Buffer() { ::operator delete(data_, std::align_val_t{kAlignment}); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    char *get() const { return static_cast<char *>(data_); }

private:
    void *data_;
};

TensorView matrix(void *data, infiniDtype_t dtype, int64_t rows, int64_t columns, int64_t stride) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.ndim = 2;
    view.shape[0] = rows;
    view.shape[1] = columns;
    view.strides[0] = stride;
    view.strides[1] = 1;
    return view;
}

char *element(const TensorView &view, int64_t offset) {
    return view.as<char>() + offset * static_cast<int64_t>(size_of(view.dtype));
}

// all[i]
TensorView select(const TensorView &all, int64_t i) {
    TensorView view = all;
    view.data = element(all, i * all.strides[0]);
    view.ndim = all.ndim - 1;
    for (int d = 0; d < view.ndim; ++d) {
        view.shape[d] = all.shape[d + 1];
        view.strides[d] = all.strides[d + 1];
    }
    return view;
}

bool given(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

// The rows of an expert's weight.
int64_t rows_of(const Weights &weights) {
    if (weights.panel_kind != nullptr) {
        return weights.data.size(1) * kPanel;
    }
    return (given(weights.scales) ? weights.scales : weights.data).size(1);
}

// The columns between the two products.
int64_t inner_of(const Args &args) {
    return rows_of(args.gate_up) / (has_gate(args.activation) ? 2 : 1);
}

// How weights are stored: dense by rows or by columns, or quantized.
enum class Form { kRows, kColumns, kPanels, kBlocks, kBlockPanels };

Form form_of(const Weights &weights) {
    const TensorView &data = weights.data;
    return given(weights.scales)                        ? Form::kPanels
           : weights.panel_kind != nullptr              ? Form::kBlockPanels
           : weights.kind != nullptr                    ? Form::kBlocks
           : data.size(-1) <= 1 || data.stride(-1) == 1 ? Form::kRows
                                                        : Form::kColumns;
}

// The op that multiplies by weights in panels, whose blocks have this size; null for another size.
const panels::Op *op_of(int64_t block_bytes) {
    for (const panels::Op *op : {&linear_group8::kOp, &linear_table4::kOp}) {
        if (op->block_bytes == block_bytes) {
            return op;
        }
    }
    return nullptr;
}

// y = x @ weight^T + bias for a weight [n, k] of adjacent columns, which gemm reads in place. The bias is added before
// the one rounding, as linear does.
void multiply_columns(const ExecutionContext &context, const TensorView &x, const TensorView &weight,
                      const TensorView &bias, const TensorView &y) {
    if (y.numel() == 0) {
        return;
    }
    gemm::Args args;
    args.c = y;
    args.a = x;
    args.b = matrix(weight.data, weight.dtype, weight.shape[1], weight.shape[0], weight.strides[1]);
    args.b.strides[1] = weight.strides[0];
    if (gemm::library_takes(context, gemm::Products::kMatmul, args)) {
        return gemm::multiply_by_library(context, args, bias);
    }
    if (given(bias)) {
        for (int64_t row = 0; row < y.shape[0]; ++row) {
            std::memcpy(element(y, row * y.strides[0]), bias.data, y.shape[1] * size_of(y.dtype));
        }
        args.beta = 1;
    }
    gemm::compute(context, args);
}

// y = x @ weights[expert]^T + bias[expert]. workspace: as workspace_size says.
void multiply(const ExecutionContext &context, const TensorView &x, const Weights &weights, int64_t expert,
              const TensorView &y, void *workspace) {
    const TensorView data = select(weights.data, expert);
    const TensorView bias = given(weights.bias) ? select(weights.bias, expert) : TensorView{};
    switch (form_of(weights)) {
    case Form::kRows: {
        linear::Args args;
        args.x = x;
        args.weight[0] = data;
        args.bias[0] = bias;
        args.y = y;
        return linear::run(context, args);
    }
    case Form::kColumns:
        return multiply_columns(context, x, data, bias, y);
    case Form::kPanels: {
        panels::Args args;
        args.x = x;
        args.weight = data;
        args.scales = select(weights.scales, expert);
        args.bias = bias;
        args.y = y;
        return op_of(data.size(-1))->run(context, args);
    }
    case Form::kBlocks:
        return linear_blocks::run(context, {y, x, data, bias, weights.kind, workspace});
    case Form::kBlockPanels:
        return linear_block_panels::run(context, {y, x, data, bias, weights.kind, weights.panel_kind, workspace});
    }
}

// Consecutive experts whose rows are computed together: expert e has rows begin[e] to begin[e + 1] of the pairs.
struct Batch {
    int64_t first, end;
    const int64_t *begin;
    int64_t from() const { return begin[first]; }
    int64_t rows() const { return begin[end] - begin[first]; }
};

// Computes the products of a batch: of one expert, or of several ones in panels of blocks.
void multiply(const ExecutionContext &context, const TensorView &x, const Weights &weights, const Batch &batch,
              const TensorView &y, void *workspace) {
    if (batch.end - batch.first == 1) {
        return multiply(context, x, weights, batch.first, y, workspace);
    }
    std::vector<linear_block_panels::Args> products;
    for (int64_t e = batch.first; e < batch.end; ++e) {
        const int64_t row = batch.begin[e] - batch.from(), rows = batch.begin[e + 1] - batch.begin[e];
        if (rows > 0) {
            const auto own = [&](const TensorView &all) {
                return matrix(element(all, row * all.strides[0]), all.dtype, rows, all.shape[1], all.strides[0]);
            };
            products.push_back({own(y), own(x), select(weights.data, e),
                                given(weights.bias) ? select(weights.bias, e) : TensorView{}, weights.kind,
                                weights.panel_kind, workspace});
        }
    }
    linear_block_panels::run_together(context, {products.data(), static_cast<int64_t>(products.size())});
}

// The bytes that multiply needs for so many rows of x.
int64_t workspace_size(const ExecutionContext &context, const Args &args, int64_t rows) {
    const infiniDtype_t dtype = args.x.dtype;
    const int64_t hidden = args.x.size(1), inner = inner_of(args);
    const auto size = [&](const Weights &weights, int64_t n, int64_t k) -> size_t {
        const TensorView y = matrix(nullptr, dtype, rows, n, n), x = matrix(nullptr, dtype, rows, k, k);
        switch (form_of(weights)) {
        case Form::kBlocks:
            return linear_blocks::workspace_size(context, {y, x, select(weights.data, 0), {}, weights.kind});
        case Form::kBlockPanels:
            return linear_block_panels::workspace_size(
                context, {y, x, select(weights.data, 0), {}, weights.kind, weights.panel_kind});
        default:
            return 0;
        }
    };
    const size_t first = size(args.gate_up, rows_of(args.gate_up), hidden), second = size(args.down, hidden, inner);
    return static_cast<int64_t>(first > second ? first : second);
}

void check_indices(const Args &args) {
    const Indices index(args.index);
    const int64_t experts = all_experts(args);
    if (experts == 0 && args.index.numel() > 0) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "gate_up", "have experts, for index has some",
                   shape_of(args.gate_up.data));
    }
    for (int64_t t = 0; t < args.index.shape[0]; ++t) {
        for (int64_t j = 0; j < args.index.shape[1]; ++j) {
            const int64_t expert = index.at(t * args.index.strides[0] + j * args.index.strides[1]);
            if (expert < 0 || expert >= experts) {
                kRule.fail(INFINI_STATUS_BAD_PARAM, "index",
                           message("be from 0 to ", experts - 1,
                                   args.total_experts < 0 ? ", the experts of gate_up" : ", one of total_experts"),
                           message(expert, " at [", t, ", ", j, "]"));
            }
        }
    }
}

// The experts from `first` on that are computed together: several if both weights are in panels of blocks, and if they
// have few rows.
Batch batch_from(const Args &args, const std::vector<int64_t> &begin, int64_t first) {
    Batch batch{first, first + 1, begin.data()};
    if (form_of(args.gate_up) == Form::kBlockPanels && form_of(args.down) == Form::kBlockPanels) {
        const int64_t experts = args.gate_up.data.size(0);
        while (batch.end < experts &&
               begin[static_cast<size_t>(batch.end) + 1] - batch.from() <= linear_block_panels::kTogether) {
            ++batch.end;
        }
    }
    return batch;
}

// Tokens [first, first + tokens).
void compute(const ExecutionContext &context, const Args &args, int64_t first, int64_t tokens) {
    const Indices index(args.index);
    const int64_t experts = args.gate_up.data.size(0), inner = inner_of(args), hidden = args.x.size(1);
    const int64_t n = rows_of(args.gate_up);
    const int64_t k = args.index.size(1), pairs = tokens * k;
    const auto expert_of = [&](int64_t pair) { // -1: of another rank
        const int64_t e = index.at((first + pair / k) * args.index.strides[0] + pair % k * args.index.strides[1]);
        return own_expert(e, args.first_expert, experts);
    };
    // Pairs of a token and its j-th expert, sorted by expert: each gets a row of the results.
    std::vector<int64_t> begin(static_cast<size_t>(experts) + 1), row(static_cast<size_t>(pairs)),
        token(static_cast<size_t>(pairs)), choice(static_cast<size_t>(pairs));
    for (int64_t pair = 0; pair < pairs; ++pair) {
        if (const int64_t e = expert_of(pair); e >= 0) {
            ++begin[static_cast<size_t>(e) + 1];
        }
    }
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
        begin[e + 1] += begin[e];
    }
    std::vector<Batch> batches;
    int64_t most = 0; // rows of a batch
    for (int64_t e = 0; e < experts; e = batches.back().end) {
        batches.push_back(batch_from(args, begin, e));
        most = batches.back().rows() > most ? batches.back().rows() : most;
    }
    std::vector<int64_t> next(begin);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t e = expert_of(pair), at = e < 0 ? -1 : next[static_cast<size_t>(e)]++;
        row[static_cast<size_t>(pair)] = at;
        if (e < 0) {
            continue;
        }
        token[static_cast<size_t>(at)] = first + pair / k;
        choice[static_cast<size_t>(at)] = pair % k;
    }
    const infiniDtype_t dtype = args.x.dtype;
    const auto size = static_cast<int64_t>(size_of(dtype));
    const int64_t elements = ((pairs * hidden + most * (hidden + n + inner)) * size / kAlignment + 1) * kAlignment;
    const Buffer memory(elements + workspace_size(context, args, most));
    char *const results = memory.get(), *const gathered = results + pairs * hidden * size;
    char *const both = gathered + most * hidden * size, *const gated = both + most * n * size;
    char *const workspace = memory.get() + elements;
    for (const Batch &batch : batches) {
        const int64_t from = batch.from(), rows = batch.rows();
        if (rows == 0) {
            continue;
        }
        const auto x_of = [&](int64_t i) {
            return element(args.x, token[static_cast<size_t>(from + i)] * args.x.strides[0]);
        };
        TensorView x = matrix(x_of(0), dtype, rows, hidden, hidden);
        if (args.weights_on_input) {
            x.data = gathered;
            scale_kernel(context, {args.x, args.weights, token.data() + from, choice.data() + from, x});
        } else if (rows > 1) {
            for (int64_t i = 0; i < rows; ++i) {
                std::memcpy(gathered + i * hidden * size, x_of(i), static_cast<size_t>(hidden * size));
            }
            x.data = gathered;
        }
        const TensorView gate_up = matrix(both, dtype, rows, n, n);
        const TensorView h = matrix(gated, dtype, rows, inner, inner);
        multiply(context, x, args.gate_up, batch, gate_up, workspace);
        gate_kernel(context, {h, gate_up, static_cast<Activation>(args.activation), args.interleaved,
                              static_cast<float>(args.alpha), static_cast<float>(args.limit)});
        multiply(context, h, args.down, batch, matrix(results + from * hidden * size, dtype, rows, hidden, hidden),
                 workspace);
    }
    SumArgs sum{args.y, args.weights, !args.weights_on_input, results, row.data()};
    for (TensorView *view : {&sum.y, &sum.weights}) {
        view->data = element(*view, first * view->strides[0]);
        view->shape[0] = tokens;
    }
    sum_kernel(context, sum);
}

void run_on_cpu(const ExecutionContext &context, const Args &args) {
    check_indices(args);
    const int64_t tokens = args.x.size(0);
    for (int64_t first = 0; first < tokens; first += kMaxTokens) {
        compute(context, args, first, tokens - first < kMaxTokens ? tokens - first : kMaxTokens);
    }
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};

// The names of the arguments that describe the weights of one product.
struct Names {
    const char *data, *scales, *bias, *quantized_by;
    Reason rows;
};
constexpr Names kGateUp{"gate_up", "gate_up_scales", "gate_up_bias",
                        "be given with gate_up_scales or gate_up_kind if it is uint8", "to match the rows of gate_up"},
    kDown{"down", "down_scales", "down_bias", "be given with down_scales or down_kind if it is uint8",
          "to match gate_up and x"};

// Checks all about weights but the number of rows where n < 0: that of gate_up, which is even if gate is in it.
void check_weights(const Names &names, const Weights &weights, const TensorView &x, int64_t experts, int64_t n,
                   int64_t k, bool gated) {
    const TensorView &data = weights.data;
    const Form form = form_of(weights);
    const bool is_first = n < 0;
    const char *const why = is_first ? "to match the last dimension of x" : "to match gate_up and x";
    if (form == Form::kPanels && weights.kind != nullptr) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, names.scales, "be None for weights in blocks", "a tensor");
    }
    const bool quantized = form != Form::kRows && form != Form::kColumns;
    if (!quantized && data.dtype == INFINI_DTYPE_U8) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, names.data, names.quantized_by, "neither");
    }
    if (form == Form::kPanels) {
        const TensorView &scales = weights.scales;
        kRule.rank(names.data, data, 4);
        kRule.rank(names.scales, scales, 2);
        kRule.dtype(names.scales, scales, {INFINI_DTYPE_F32});
        kRule.dense_last(names.scales, scales);
    } else {
        kRule.rank(names.data, data, quantized ? 4 : 3);
        if (form == Form::kBlockPanels && data.size(1) > std::numeric_limits<int64_t>::max() / kPanel) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, names.data, "have rows that 64 bits can count", shape_of(data));
        }
    }
    if (is_first) {
        const TensorView &rows = form == Form::kPanels ? weights.scales : data;
        experts = data.size(0);
        n = rows_of(weights);
        if (gated && n % 2 != 0) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, form == Form::kPanels ? names.scales : names.data,
                       "have an even second dimension, gate and up", shape_of(rows));
        }
    }
    if (form == Form::kPanels) {
        kRule.shape(names.scales, weights.scales, {experts, n},
                    is_first ? "to match the experts of gate_up" : "to match gate_up and x");
        kRule.dtype(names.data, data, {INFINI_DTYPE_U8});
        const int64_t bytes = data.size(3);
        if (op_of(bytes) == nullptr) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, names.data,
                       message("have blocks of ", linear_group8::kOp.block_bytes, " bytes (group8) or ",
                               linear_table4::kOp.block_bytes, " (table4)"),
                       std::to_string(bytes));
        }
        const auto up = [](int64_t value, int64_t step) { return value / step + (value % step != 0); };
        kRule.shape(names.data, data, {experts, up(n, panels::kPanel), up(k, panels::kBlock), bytes},
                    "to match gate_up_scales and x");
        kRule.contiguous(names.data, data);
    } else if (quantized) {
        const linear_blocks::Kind &kind = *weights.kind;
        kRule.dtype(names.data, data, {INFINI_DTYPE_U8});
        if (k % kind.elements != 0) {
            kRule.fail(
                INFINI_STATUS_BAD_TENSOR_SHAPE, names.data,
                message("have rows of a multiple of ", kind.elements, " elements, for they are blocks of ", kind.name),
                std::to_string(k));
        }
        if (form == Form::kBlockPanels) {
            if (n % kPanel != 0) {
                kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, names.data,
                           message("have a multiple of ", kPanel, " rows, for they are in panels"), std::to_string(n));
            }
            kRule.shape(names.data, data, {experts, n / kPanel, k / kind.elements, kPanel * kind.bytes}, why);
            kRule.contiguous(names.data, data);
        } else {
            kRule.shape(names.data, data, {experts, n, k / kind.elements, kind.bytes}, why);
            if (data.numel() > 0 && (data.stride(3) != 1 || (data.size(2) > 1 && data.stride(2) != kind.bytes))) {
                kRule.fail(INFINI_STATUS_BAD_TENSOR_STRIDES, names.data,
                           "have the blocks of a row adjacent (call .contiguous() on it)",
                           message("strides ", strides_of(data)));
            }
        }
    } else {
        kRule.same_dtype(names.data, data, "x", x);
        kRule.shape(names.data, data, {experts, n, k}, why);
        gemm::check_layout(kRule, names.data, data);
    }
    if (given(weights.bias)) {
        kRule.same_dtype(names.bias, weights.bias, "x", x);
        kRule.shape(names.bias, weights.bias, {experts, n}, names.rows);
        kRule.dense_last(names.bias, weights.bias);
    }
}

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x;
    kRule.rank("x", x, 2);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.dense_last("x", x);
    if (args.activation < 0 || args.activation >= kActivations) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "activation",
                   "be 0 (swiglu), 1 (geglu), 2 (swiglu_oai), 3 (swiglu_clamped) or 4 (relu2_no_mul)",
                   std::to_string(args.activation));
    }
    check_weights(kGateUp, args.gate_up, x, -1, -1, x.size(1), has_gate(args.activation));
    check_weights(kDown, args.down, x, args.gate_up.data.size(0), x.size(1), inner_of(args), false);
    kRule.rank("index", args.index, 2);
    kRule.dtype("index", args.index, INFINI_INDICES);
    kRule.shape("index", args.index, {x.size(0), args.index.size(1)}, "to match the rows of x");
    kRule.same_dtype_or_float32("weights", args.weights, "x", x);
    kRule.same_shape("weights", args.weights, "index", args.index);
    const int64_t experts = args.gate_up.data.size(0);
    if (args.total_experts < -1 || (args.total_experts >= 0 && args.total_experts < experts)) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "total_experts",
                   message("be at least ", experts, ", the experts of gate_up"), std::to_string(args.total_experts));
    }
    if (args.first_expert < 0 || args.first_expert > all_experts(args) - experts) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "first_expert",
                   message("be from 0 to ", all_experts(args) - experts, ", for gate_up has ", experts, " of ",
                           all_experts(args), " experts"),
                   std::to_string(args.first_expert));
    }
    if (!(args.limit >= 0)) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "limit", "be at least 0", message(args.limit));
    }
}

void check_output(const Args &args) {
    kRule.rows_of_x("out", args.y, args.x, args.x.size(1), "that of x");
    const auto check = [&](const Names &names, const Weights &weights) {
        kRule.no_overlap("out", args.y, names.data, weights.data);
        if (given(weights.scales)) {
            kRule.no_overlap("out", args.y, names.scales, weights.scales);
        }
        if (given(weights.bias)) {
            kRule.no_overlap("out", args.y, names.bias, weights.bias);
        }
    };
    check(kGateUp, args.gate_up);
    check(kDown, args.down);
    kRule.no_overlap("out", args.y, "index", args.index);
    kRule.no_overlap("out", args.y, "weights", args.weights);
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::fused_experts
