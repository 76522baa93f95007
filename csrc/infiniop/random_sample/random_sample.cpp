// The rules of random_sample, and the call of its kernel.
#include "random_sample.h"

#include <cmath>

#include "check.h"

namespace infini::random_sample {

KernelTable<Args> kernels{"random_sample"};

namespace {

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};

// Calls check(value) for each row's value until it returns false; then fails with a message that names value and row.
template <typename T, typename Check>
void each_row(const Checker &rule, const char *argument, const TensorView &view, int64_t rows, const char *words,
              const Check &check) {
    for (int64_t row = 0; row < rows; ++row) {
        const T value = view.as<const T>()[row * view.strides[0]];
        if (!check(value)) {
            rule.fail(INFINI_STATUS_BAD_PARAM, argument, words, message(value, " in row ", row));
        }
    }
}

// Whether the value is NaN: its exponent is all ones and its mantissa is not 0.
bool is_nan(const TensorView &logits, int64_t row, int64_t column) {
    const int64_t at = (logits.ndim == 1 ? 0 : row * logits.stride(0)) + column;
    if (logits.dtype == INFINI_DTYPE_F32) {
        return std::isnan(logits.as<const float>()[at]);
    }
    const uint16_t infinity = logits.dtype == INFINI_DTYPE_BF16 ? 0x7f80 : 0x7c00;
    return (logits.as<const uint16_t>()[at] & 0x7fff) > infinity;
}

} // namespace

void run(const ExecutionContext &context, const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &logits = args.logits, &out = args.out;
    rule.rank("logits", logits, 1, 2);
    rule.dtype("logits", logits, INFINI_FLOATS);
    rule.dense_last("logits", logits);
    const int64_t n = logits.size(-1);
    if (n < 1 || n > kMaxColumns) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "logits", message("have 1 to ", kMaxColumns, " columns"),
                  std::to_string(n));
    }
    const bool one_row = logits.ndim == 1;
    const int64_t rows = one_row ? 1 : logits.size(0);
    const auto check_rows = [&](const char *name, const TensorView &view, std::initializer_list<infiniDtype_t> dtypes) {
        if (one_row) {
            rule.shape(name, view, {}, "for logits of one dimension");
        } else {
            rule.shape(name, view, {rows}, "to match the rows of logits");
        }
        rule.dtype(name, view, dtypes);
    };
    check_rows("temperature", args.temperature, {INFINI_DTYPE_F32});
    check_rows("top_k", args.top_k, INFINI_INDICES);
    check_rows("top_p", args.top_p, {INFINI_DTYPE_F32});
    check_rows("seed", args.seed, INFINI_INDICES);
    check_rows("offset", args.offset, INFINI_INDICES);
    check_rows("out", out, {INFINI_DTYPE_I64});
    rule.writable("out", out);
    rule.no_partial_overlap("out", out, "logits", logits);
    rule.no_partial_overlap("out", out, "temperature", args.temperature);
    rule.no_partial_overlap("out", out, "top_k", args.top_k);
    rule.no_partial_overlap("out", out, "top_p", args.top_p);
    rule.no_partial_overlap("out", out, "seed", args.seed);
    rule.no_partial_overlap("out", out, "offset", args.offset);
    if (context.is_cpu()) {
        each_row<float>(rule, "temperature", args.temperature, rows, "be a finite number of at least 0",
                        [](float t) { return t >= 0 && std::isfinite(t); });
        each_row<float>(rule, "top_p", args.top_p, rows, "be a number of at least 0", [](float p) { return p >= 0; });
    }
    kernels.run(context, args);
    for (int64_t row = 0; row < rows && context.is_cpu(); ++row) {
        const int64_t token = out.as<const int64_t>()[row * out.strides[0]];
        if (token >= 0) {
            continue;
        }
        const int64_t column = -1 - token;
        if (column == n) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "logits", "have a value above -infinity in every row",
                      message("none in row ", row));
        }
        rule.fail(INFINI_STATUS_BAD_PARAM, "logits", "be below +infinity and not NaN",
                  message(is_nan(logits, row, column) ? "nan" : "inf", " at row ", row, ", column ", column));
    }
}

} // namespace infini::random_sample
