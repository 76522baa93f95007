// random_sample: draws one token id per row of logits [rows, n], by temperature, top-k and top-p. Each row has its own
// settings and Philox stream: a row's token depends on that row alone. Weights exp((x - max) / temperature) are
// computed in float, their sums in double, in an order fixed by n alone.
#pragma once

#include "check.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::random_sample {

// u has 24 bits: with more columns, some could never be drawn.
constexpr int64_t kMaxColumns = int64_t{1} << 24;

struct Args {
    TensorView out;         // [rows] int64, or [] if logits is [n]; so are all below
    TensorView logits;      // [rows, n] or [n], float32, bfloat16 or float16; -infinity masks a token
    TensorView temperature; // [rows] float32; 0: take the first maximum
    TensorView top_k;       // [rows] int64 or int32; 1: take the first maximum; 0 or less: no limit
    TensorView top_p;       // [rows] float32; 0: take the first maximum; 1 or more: no limit
    TensorView seed;        // [rows] int64 or int32, the 64 bits of the key
    TensorView offset;      // [rows] int64 or int32, the low 64 bits of the counter
};

// Checks the arguments against the rules above, then draws the tokens. `out` may alias top_k, seed or offset. On CUDA
// values cannot be checked: a row that cannot be sampled gets a token below 0, as described at the kernels below.
void run(const ExecutionContext &context, const char *op, const Args &args);

// The names of the op that takes u, and of its tensors, in messages.
struct GivenNames {
    Checker rule;
    const char *logits, *out;
};
inline constexpr GivenNames kRandomSampleGiven{Checker("random_sample_given"), "logits", "out"};
inline constexpr GivenNames kRandomSampleOfC{Checker("random_sample"), "probs", "result"};

// The same for one row with a given u: torch.ops.infini.random_sample_given, and RandomSample of the C ABI.
struct GivenArgs {
    TensorView result;     // [], any integers that hold n - 1
    TensorView probs;      // [n] logits as above, or float64, which is computed in double
    double random_val = 0; // u, in [0, 1]; 0: take the first maximum. Rounded to float before use, as are the next two.
    double topp = 1;
    int topk = 0;
    double temperature = 1;
    const GivenNames *names = &kRandomSampleGiven;
};

void check(const GivenArgs &args);
void run(const ExecutionContext &context, const GivenArgs &args);

// A row that cannot be sampled gets -1 - c as its token: c is the first column with NaN or +infinity, or n if every
// logit is -infinity. `run` turns it into an Error (threads cannot throw). On CUDA c is n + 1 if temperature or top_p
// is out of range, and in integers of less than 4 bytes the token is -1, all bits set.
INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

struct Given {
    const GivenArgs &args; // not float64, which run computes itself
    int64_t &token;
};

INFINI_CPU_KERNEL(cpu_kernel_given, Given)
extern KernelTable<GivenArgs> given_kernels; // including float64

} // namespace infini::random_sample
