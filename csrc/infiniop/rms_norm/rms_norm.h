// rms_norm:     y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension of x [..., n], weight [n].
// add_rms_norm: the same for h = x + residual, which it also returns (the residual stream of a transformer layer).
// One kernel serves both. Computed in float (float64 in double), the sum of squares in a fixed order.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::rms_norm {

// Where the value is rounded to the dtype of x. Hugging Face's model families differ, and equal tokens require their
// order of operations.
enum class Rounding : int {
    kOnce = 0,  // y = round(x * r * w): Infini; also "fp32 weight" as in Olmo 2 and 3
    kLlama = 1, // y = w * round(x * r), in the wider dtype of x and w: Llama, Mistral, Qwen
    kGemma = 2, // y = round(x * r * (1 + w)): Gemma 1 to 3
    // The same of the sum x + residual before it is rounded to h, as engines do that keep the sum in registers. Without
    // a residual they are the three above.
    kWideOnce = 3,
    kWideLlama = 4,
    kWideGemma = 5,
};

// One of the first three, for a mode with a wide sum too.
constexpr Rounding order_of(Rounding rounding) {
    return static_cast<Rounding>(static_cast<int>(rounding) % 3);
}

// Whether y is the norm of a sum that is not rounded; of dtypes that are computed in, it is the same.
constexpr bool is_wide(Rounding rounding) {
    return rounding >= Rounding::kWideOnce;
}

struct Args {
    TensorView y;        // [..., n], the dtype of x; with kLlama, kWideLlama and a float32 weight: float32
    TensorView h;        // [..., n], out: round(x + residual); dtype == INFINI_DTYPE_INVALID: plain rms_norm
    TensorView x;        // [..., n]
    TensorView residual; // [..., n], if h is present
    TensorView weight;   // [n], the dtype of x or float32; with kOnce, kWideOnce any half type for a half type
    double eps = 0;
    Rounding rounding = Rounding::kOnce;
};

// The dtype of y.
infiniDtype_t output_dtype(infiniDtype_t x, infiniDtype_t weight, Rounding rounding);

// Checks the arguments against the rules above. y or h may alias x or residual. `op` is the op's name in messages.
void check(const char *op, const Args &args);

// Checks the arguments, then computes y (and h).
void run(const ExecutionContext &context, const char *op, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::rms_norm
