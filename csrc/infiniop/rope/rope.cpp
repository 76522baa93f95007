// The rules of rope, and the call of its kernel. Positions are checked here, before anything is written; the CPU kernel
// does not check them.
#include "rope.h"

#include "check.h"

namespace infini::rope {

KernelTable<Args> kernels{"rope"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

TensorView with_batch(const TensorView &view, int64_t batch, int ndim) {
    TensorView batched = view;
    const int added = ndim - view.ndim;
    batched.ndim = ndim;
    for (int i = 0; i < view.ndim; ++i) {
        batched.shape[i + added] = view.shape[i];
        batched.strides[i + added] = view.strides[i];
    }
    if (added || view.shape[0] == 1) {
        batched.shape[0] = batch;
        batched.strides[0] = 0;
    }
    return batched;
}

namespace {

// Checks for a shape [S, ...] or [B or 1, S, ...] with `inner` dimensions after S.
void check_tokens(const Checker &rule, const char *name, const TensorView &view, const TensorView &x, int inner) {
    const int64_t tokens = x.size(-3), batch = x.ndim == 4 ? x.size(0) : 1;
    const bool fits = view.ndim == 1 + inner
                          ? view.shape[0] == tokens
                          : view.shape[1] == tokens && (view.shape[0] == batch || view.shape[0] == 1);
    if (!fits) {
        const char *const more = inner ? ", R/2]" : "]";
        const std::string many = batch == 1 ? "1" : message(batch, " or 1");
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, name,
                  message("have shape [", tokens, more, " or [", many, ", ", tokens, more, " to match x"),
                  shape_of(view));
    }
}

} // namespace

void check_tables(const Checker &rule, const char *x_name, const TensorView &x, const TensorView &cos,
                  const TensorView &sin, int max_rank) {
    rule.rank("cos", cos, 2, max_rank);
    if (cos.size(-1) > x.size(-1) / 2) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "cos",
                  message("have at most ", x.size(-1) / 2, " columns, half the last dimension of ", x_name),
                  message(cos.size(-1), " (shape ", shape_of(cos), ")"));
    }
    if (cos.dtype != x.dtype && !(is_half(x.dtype) && cos.dtype == INFINI_DTYPE_F32)) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "cos",
                  message("be ", name_of(x.dtype), " as ", x_name, " is", is_half(x.dtype) ? ", or float32" : ""),
                  name_of(cos.dtype));
    }
    rule.dense_last("cos", cos);
    rule.same_shape("sin", sin, "cos", cos);
    rule.same_dtype("sin", sin, "cos", cos);
    rule.dense_last("sin", sin);
}

void check_positions_dtype(const Checker &rule, const TensorView &positions) {
    rule.dtype("positions", positions,
               {INFINI_DTYPE_I64, INFINI_DTYPE_I32, INFINI_DTYPE_I16, INFINI_DTYPE_I8, INFINI_DTYPE_U64,
                INFINI_DTYPE_U32, INFINI_DTYPE_U16, INFINI_DTYPE_U8});
}

void check_positions(const Checker &rule, const TensorView &positions, int64_t rows) {
    const TensorView batched = with_batch(positions, positions.ndim == 2 ? positions.shape[0] : 1, 2);
    for (int64_t b = 0; b < batched.shape[0]; ++b) {
        for (int64_t s = 0; s < batched.shape[1]; ++s) {
            const int64_t value = position(batched, b, s);
            if (value < 0 || value >= rows) {
                const std::string index = positions.ndim == 1 ? message("[", s, "]") : message("[", b, ", ", s, "]");
                rule.fail(INFINI_STATUS_BAD_PARAM, "positions",
                          message("be at least 0 and less than ", rows, ", the rows of cos"),
                          message(value, " at ", index));
            }
        }
    }
}

void check(const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &x = args.x, &y = args.y, &cos = args.cos, &sin = args.sin, &positions = args.positions;
    const bool has_positions = positions.dtype != INFINI_DTYPE_INVALID;
    rule.rank("x", x, 3, 4);
    rule.dtype("x", x, INFINI_FLOATS_AND_DOUBLE);
    rule.dense_last("x", x);
    check_tables(rule, "x", x, cos, sin, has_positions ? 2 : 3);
    if (!has_positions) {
        check_tokens(rule, "cos", cos, x, 1);
    }

    rule.same_shape("out", y, "x", x);
    rule.same_dtype("out", y, "x", x);
    rule.dense_last("out", y);
    rule.writable("out", y);
    rule.no_partial_overlap("out", y, "x", x);
    rule.no_partial_overlap("out", y, "cos", cos);
    rule.no_partial_overlap("out", y, "sin", sin);
    if (has_positions) {
        rule.rank("positions", positions, 1, 2);
        check_positions_dtype(rule, positions);
        check_tokens(rule, "positions", positions, x, 0);
        rule.no_partial_overlap("out", y, "positions", positions);
    }
}

void run(const ExecutionContext &context, const char *op, const Args &args) {
    check(op, args);
    const Checker rule(op);
    const TensorView &x = args.x, &cos = args.cos, &positions = args.positions;
    Args batched = args;
    const int64_t batch = x.ndim == 4 ? x.size(0) : 1;
    batched.x = with_batch(x, batch, 4);
    batched.y = with_batch(args.y, batch, 4);
    if (positions.dtype != INFINI_DTYPE_INVALID) {
        if (context.is_cpu()) {
            check_positions(rule, positions, cos.shape[0]);
        }
        batched.positions = with_batch(positions, batch, 2);
    } else {
        batched.cos = with_batch(cos, batch, 3);
        batched.sin = with_batch(args.sin, batch, 3);
    }
    if (x.numel() > 0) {
        kernels.run(context, batched);
    }
}

} // namespace infini::rope
