// The rules of fused_experts, and its kernel on the CPU: tokens are sorted by expert, and each expert's are multiplied
// by the kernels of linear or of its quantized kinds.
// Limit: for few tokens the memory bandwidth of the chosen experts' weights, for many the multiply-add units.
#include "fused_experts.h"

#include <cstring>
#include <new>
#include <vector>

#include "check.h"
#include "elementwise/elementwise.h"
#include "indices.h"
#include "linear/linear.h"
#include "linear_group8/linear_group8.h"
#include "linear_table4/linear_table4.h"

namespace infini::fused_experts {

KernelTable<Args> kernels{"fused_experts"};

namespace {

constexpr Checker kRule("fused_experts");

// So many tokens are computed at a time: results of up to k experts are held for each.
constexpr int64_t kMaxTokens = 1024;

// Memory aligned to cache lines.
class Buffer {
public:
    explicit Buffer(int64_t bytes) : data_(::operator new(static_cast<size_t>(bytes), std::align_val_t{64})) {}
    ~Buffer() { ::operator delete(data_, std::align_val_t{64}); }
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

bool is_dense(const TensorView &scales) {
    return scales.dtype == INFINI_DTYPE_INVALID;
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

// y = x @ weights[expert]^T
void multiply(const ExecutionContext &context, const TensorView &x, const TensorView &weights, const TensorView &scales,
              int64_t expert, const TensorView &y) {
    if (is_dense(scales)) {
        linear::Args args;
        args.x = x;
        args.weight[0] = select(weights, expert);
        args.y = y;
        return linear::run(context, args);
    }
    panels::Args args;
    args.x = x;
    args.weight = select(weights, expert);
    args.scales = select(scales, expert);
    args.y = y;
    op_of(weights.size(-1))->run(context, args);
}

// The columns between the two products.
int64_t inner_of(const Args &args) {
    return (is_dense(args.gate_up_scales) ? args.gate_up : args.gate_up_scales).size(1) / 2;
}

void gate(const ExecutionContext &context, int64_t activation, const TensorView &both, const TensorView &y) {
    const int64_t inner = y.shape[1];
    const TensorView first = matrix(both.data, both.dtype, y.shape[0], inner, both.strides[0]);
    const TensorView second = matrix(element(both, inner), both.dtype, y.shape[0], inner, both.strides[0]);
    const auto op =
        activation == static_cast<int64_t>(Activation::kSwiglu) ? elementwise::Op::swiglu : elementwise::Op::geglu;
    elementwise::run(context, {op, {y, second, first}}, {"fused_experts", {"out", "up", "gate"}, 2});
}

void check_indices(const Args &args) {
    const Indices index(args.index);
    const int64_t experts = args.gate_up.size(0);
    if (experts == 0 && args.index.numel() > 0) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "gate_up", "have experts, for index has some",
                   shape_of(args.gate_up));
    }
    for (int64_t t = 0; t < args.index.shape[0]; ++t) {
        for (int64_t j = 0; j < args.index.shape[1]; ++j) {
            const int64_t expert = index.at(t * args.index.strides[0] + j * args.index.strides[1]);
            if (expert < 0 || expert >= experts) {
                kRule.fail(INFINI_STATUS_BAD_PARAM, "index",
                           message("be from 0 to ", experts - 1, ", the experts of gate_up"),
                           message(expert, " at [", t, ", ", j, "]"));
            }
        }
    }
}

// Tokens [first, first + tokens).
void compute(const ExecutionContext &context, const Args &args, int64_t first, int64_t tokens) {
    const Indices index(args.index);
    const int64_t experts = args.gate_up.size(0), inner = inner_of(args), hidden = args.x.size(1);
    const int64_t k = args.index.size(1), pairs = tokens * k;
    const auto expert_of = [&](int64_t pair) {
        return index.at((first + pair / k) * args.index.strides[0] + pair % k * args.index.strides[1]);
    };
    // Pairs of a token and its j-th expert, sorted by expert: each gets a row of the results.
    std::vector<int64_t> begin(static_cast<size_t>(experts) + 1), row(static_cast<size_t>(pairs)),
        token(static_cast<size_t>(pairs));
    for (int64_t pair = 0; pair < pairs; ++pair) {
        ++begin[static_cast<size_t>(expert_of(pair)) + 1];
    }
    int64_t most = 0;
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
        most = begin[e + 1] > most ? begin[e + 1] : most;
        begin[e + 1] += begin[e];
    }
    std::vector<int64_t> next(begin);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t at = next[static_cast<size_t>(expert_of(pair))]++;
        row[static_cast<size_t>(pair)] = at;
        token[static_cast<size_t>(at)] = first + pair / k;
    }
    const infiniDtype_t dtype = args.x.dtype;
    const auto size = static_cast<int64_t>(size_of(dtype));
    const Buffer memory((pairs * hidden + most * (hidden + 3 * inner)) * size + 64);
    char *const results = memory.get(), *const gathered = results + pairs * hidden * size;
    char *const both = gathered + most * hidden * size, *const gated = both + most * 2 * inner * size;
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t from = begin[static_cast<size_t>(e)], rows = begin[static_cast<size_t>(e) + 1] - from;
        if (rows == 0) {
            continue;
        }
        const auto x_of = [&](int64_t i) {
            return element(args.x, token[static_cast<size_t>(from + i)] * args.x.strides[0]);
        };
        TensorView x = matrix(x_of(0), dtype, rows, hidden, hidden);
        if (rows > 1) {
            for (int64_t i = 0; i < rows; ++i) {
                std::memcpy(gathered + i * hidden * size, x_of(i), static_cast<size_t>(hidden * size));
            }
            x.data = gathered;
        }
        const TensorView gate_up = matrix(both, dtype, rows, 2 * inner, 2 * inner);
        const TensorView h = matrix(gated, dtype, rows, inner, inner);
        multiply(context, x, args.gate_up, args.gate_up_scales, e, gate_up);
        gate(context, args.activation, gate_up, h);
        multiply(context, h, args.down, args.down_scales, e,
                 matrix(results + from * hidden * size, dtype, rows, hidden, hidden));
    }
    SumArgs sum{args.y, args.weights, results, row.data()};
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

void check_even(const char *name, const TensorView &view) {
    if (view.size(1) % 2 != 0) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name, "have an even second dimension, gate above up",
                   shape_of(view));
    }
}

// Checks the scales of rows of all experts; returns the number of rows.
int64_t check_scales(const char *name, const TensorView &scales) {
    kRule.rank(name, scales, 2);
    kRule.dtype(name, scales, {INFINI_DTYPE_F32});
    kRule.dense_last(name, scales);
    return scales.size(1);
}

// Checks weights in panels, of `rows` rows of k elements for each expert.
void check_panels(const char *name, const TensorView &weights, int64_t experts, int64_t rows, int64_t k,
                  const char *why) {
    kRule.dtype(name, weights, {INFINI_DTYPE_U8});
    const int64_t bytes = weights.size(3);
    if (op_of(bytes) == nullptr) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name,
                   message("have blocks of ", linear_group8::kOp.block_bytes, " bytes (group8) or ",
                           linear_table4::kOp.block_bytes, " (table4)"),
                   std::to_string(bytes));
    }
    const auto up = [](int64_t value, int64_t step) { return value / step + (value % step != 0); };
    kRule.shape(name, weights, {experts, up(rows, panels::kPanel), up(k, panels::kBlock), bytes}, why);
    kRule.contiguous(name, weights);
}

} // namespace

void check_inputs(const Args &args) {
    const TensorView &x = args.x, &gate_up = args.gate_up, &down = args.down;
    const bool dense = is_dense(args.gate_up_scales);
    kRule.rank("x", x, 2);
    kRule.dtype("x", x, INFINI_FLOATS);
    kRule.dense_last("x", x);
    if (dense != is_dense(args.down_scales)) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, dense ? "gate_up_scales" : "down_scales",
                   message("be given with ", dense ? "down_scales" : "gate_up_scales"), "None");
    }
    if (dense) {
        kRule.rank("gate_up", gate_up, 3);
        kRule.same_dtype("gate_up", gate_up, "x", x);
        check_even("gate_up", gate_up);
        kRule.shape("gate_up", gate_up, {gate_up.size(0), gate_up.size(1), x.size(1)},
                    "to match the last dimension of x");
        kRule.dense_last("gate_up", gate_up);
        kRule.rank("down", down, 3);
        kRule.same_dtype("down", down, "x", x);
        kRule.shape("down", down, {gate_up.size(0), x.size(1), gate_up.size(1) / 2}, "to match gate_up and x");
        kRule.dense_last("down", down);
    } else {
        kRule.rank("gate_up", gate_up, 4);
        const int64_t experts = gate_up.size(0), rows = check_scales("gate_up_scales", args.gate_up_scales);
        check_even("gate_up_scales", args.gate_up_scales);
        kRule.shape("gate_up_scales", args.gate_up_scales, {experts, rows}, "to match the experts of gate_up");
        check_panels("gate_up", gate_up, experts, rows, x.size(1), "to match gate_up_scales and x");
        check_scales("down_scales", args.down_scales);
        kRule.shape("down_scales", args.down_scales, {experts, x.size(1)}, "to match gate_up and x");
        kRule.rank("down", down, 4);
        check_panels("down", down, experts, x.size(1), rows / 2, "to match gate_up_scales and x");
    }
    kRule.rank("index", args.index, 2);
    kRule.dtype("index", args.index, INFINI_INDICES);
    kRule.shape("index", args.index, {x.size(0), args.index.size(1)}, "to match the rows of x");
    kRule.same_dtype_or_float32("weights", args.weights, "x", x);
    kRule.same_shape("weights", args.weights, "index", args.index);
    if (args.activation < 0 || args.activation >= kActivations) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "activation", "be 0 (swiglu) or 1 (geglu)",
                   std::to_string(args.activation));
    }
}

void check_output(const Args &args) {
    kRule.rows_of_x("out", args.y, args.x, args.x.size(1), "that of x");
    kRule.no_overlap("out", args.y, "gate_up", args.gate_up);
    kRule.no_overlap("out", args.y, "down", args.down);
    if (!is_dense(args.gate_up_scales)) {
        kRule.no_overlap("out", args.y, "gate_up_scales", args.gate_up_scales);
        kRule.no_overlap("out", args.y, "down_scales", args.down_scales);
    }
    kRule.no_overlap("out", args.y, "index", args.index);
    kRule.no_overlap("out", args.y, "weights", args.weights);
}

void run(const ExecutionContext &context, const Args &args) {
    if (args.y.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::fused_experts
