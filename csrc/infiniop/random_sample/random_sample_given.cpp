// random_sample with a given random number: the rules, the computation for float64, and the call of the kernel for
// other dtypes.
#include "random_sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"

namespace infini::random_sample {

KernelTable<GivenArgs> given_kernels{"random_sample"};

namespace {

// The largest value of an integer dtype, at most int64's.
int64_t largest(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_I8:
        return std::numeric_limits<int8_t>::max();
    case INFINI_DTYPE_U8:
        return std::numeric_limits<uint8_t>::max();
    case INFINI_DTYPE_I16:
        return std::numeric_limits<int16_t>::max();
    case INFINI_DTYPE_U16:
        return std::numeric_limits<uint16_t>::max();
    case INFINI_DTYPE_I32:
        return std::numeric_limits<int32_t>::max();
    case INFINI_DTYPE_U32:
        return std::numeric_limits<uint32_t>::max();
    default:
        return std::numeric_limits<int64_t>::max();
    }
}

// If a number fits, its lower bytes are the same for signed and unsigned.
void write(const TensorView &result, int64_t token) {
    switch (size_of(result.dtype)) {
    case 1:
        *result.as<uint8_t>() = static_cast<uint8_t>(token);
        break;
    case 2:
        *result.as<uint16_t>() = static_cast<uint16_t>(token);
        break;
    case 4:
        *result.as<uint32_t>() = static_cast<uint32_t>(token);
        break;
    default:
        *result.as<int64_t>() = token;
    }
}

// float64, for use as a reference: the definition, with a sort. Error codes as in random_sample.h.
int64_t sample_double(const GivenArgs &a) {
    const int64_t n = a.probs.size(0);
    const auto *x = a.probs.as<const double>();
    const double infinity = std::numeric_limits<double>::infinity();
    int64_t first = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!(x[i] < infinity)) {
            return -1 - i;
        }
        first = x[i] > x[first] ? i : first;
    }
    if (x[first] == -infinity) {
        return -1 - n;
    }
    const auto u = static_cast<float>(a.random_val), topp = static_cast<float>(a.topp);
    const auto temperature = static_cast<float>(a.temperature);
    if (u == 0 || topp == 0 || a.topk == 1 || temperature == 0) {
        return first;
    }
    std::vector<int64_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return x[i] != x[j] ? x[i] > x[j] : i < j; });
    std::vector<double> sums(order.size());
    double sum = 0;
    for (size_t i = 0; i < order.size(); ++i) {
        sums[i] = sum += std::exp((x[order[i]] - x[first]) / static_cast<double>(temperature));
    }
    const size_t k = a.topk > 0 && a.topk < n ? static_cast<size_t>(a.topk) : order.size();
    const double limit = u * std::min(sums[k - 1], static_cast<double>(topp) * sums.back());
    const auto found = std::lower_bound(sums.begin(), sums.begin() + static_cast<int64_t>(k) - 1, limit);
    return order[static_cast<size_t>(found - sums.begin())];
}

const char *kind_of_excess(const TensorView &probs, int64_t column) {
    bool is_nan; // else +infinity
    if (probs.dtype == INFINI_DTYPE_F64) {
        is_nan = std::isnan(probs.as<const double>()[column]);
    } else if (probs.dtype == INFINI_DTYPE_F32) {
        is_nan = std::isnan(probs.as<const float>()[column]);
    } else {
        is_nan = (probs.as<const uint16_t>()[column] & 0x7fff) > (probs.dtype == INFINI_DTYPE_BF16 ? 0x7f80 : 0x7c00);
    }
    return is_nan ? "nan" : "inf";
}

} // namespace

void check(const GivenArgs &args) {
    const TensorView &probs = args.probs, &result = args.result;
    const Checker &rule = args.names->rule;
    const char *const of_probs = args.names->logits, *const of_result = args.names->out;
    rule.rank(of_probs, probs, 1);
    rule.dtype(of_probs, probs, INFINI_FLOATS_AND_DOUBLE);
    rule.dense_last(of_probs, probs);
    const int64_t n = probs.size(0);
    if (n < 1 || n > kMaxColumns) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, of_probs, message("have 1 to ", kMaxColumns, " elements"),
                  std::to_string(n));
    }
    rule.rank(of_result, result, 0);
    rule.dtype(of_result, result,
               {INFINI_DTYPE_I64, INFINI_DTYPE_I32, INFINI_DTYPE_I16, INFINI_DTYPE_I8, INFINI_DTYPE_U64,
                INFINI_DTYPE_U32, INFINI_DTYPE_U16, INFINI_DTYPE_U8});
    if (n - 1 > largest(result.dtype)) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, of_result, message("hold the indices up to ", n - 1),
                  name_of(result.dtype));
    }
    rule.no_overlap(of_result, result, of_probs, probs);
    constexpr double limit = std::numeric_limits<float>::max();
    rule.range("random_val", args.random_val, 0, 1, "be at least 0 and at most 1");
    rule.range("topp", args.topp, 0, limit, "be a finite number of at least 0");
    rule.range("temperature", args.temperature, 0, limit, "be a finite number of at least 0");
}

void run(const ExecutionContext &context, const GivenArgs &args) {
    check(args);
    given_kernels.run(context, args);
}

namespace {

void run_on_cpu(const ExecutionContext &context, const GivenArgs &args) {
    int64_t token;
    if (args.probs.dtype == INFINI_DTYPE_F64) {
        token = sample_double(args);
    } else {
        cpu_kernel_given(context, {args, token});
    }
    if (token < 0) {
        const Checker &rule = args.names->rule;
        const int64_t column = -1 - token;
        if (column == args.probs.size(0)) {
            rule.fail(INFINI_STATUS_BAD_PARAM, args.names->logits, "have a value above -infinity", "none");
        }
        rule.fail(INFINI_STATUS_BAD_PARAM, args.names->logits, "be below +infinity and not NaN",
                  message(kind_of_excess(args.probs, column), " at ", column));
    }
    write(args.result, token);
}

const RegisteredKernel<GivenArgs> registered{given_kernels, INFINI_DEVICE_CPU, run_on_cpu};

} // namespace

} // namespace infini::random_sample
