// The elementwise ops: one table, one check, one kernel. An output element depends on the input elements with the same
// index; formulas are in formulas.h. Half types are computed in float and rounded once, float64 in double. Tensors have
// any strides; inputs may be broadcast by stride 0; the output may alias an input.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

// The ops of the C ABI, one line each: the name there, the op's name, its number of inputs, its dtypes, and its
// tensors' names, the output first. zeros and ones have an input of which only the shape matters.
#define INFINI_ELEMENTWISE_C_OPS(X)                                                                                    \
    X(Add, add, 2, kNumbers, "c", "a", "b")                                                                            \
    X(Sub, sub, 2, kFloats, "c", "a", "b")                                                                             \
    X(Mul, mul, 2, kFloats, "c", "a", "b")                                                                             \
    X(Clip, clip, 3, kFloats, "y", "x", "min_val", "max_val")                                                          \
    X(Relu, relu, 1, kFloats, "y", "x")                                                                                \
    X(Gelu, gelu, 1, kFloats, "output", "input")                                                                       \
    X(Sigmoid, sigmoid, 1, kFloats, "y", "x")                                                                          \
    X(Silu, silu, 1, kFloats, "output", "input")                                                                       \
    X(Softplus, softplus, 1, kFloats, "y", "x")                                                                        \
    X(Tanh, tanh, 1, kFloats, "output", "input")                                                                       \
    X(SwiGLU, swiglu, 2, kFloats, "c", "a", "b")                                                                       \
    X(Zeros, zeros, 1, kAll, "y", "x")                                                                                 \
    X(Ones, ones, 1, kAll, "y", "x")

// All ops: those of the C ABI, and those that only torch has.
#define INFINI_ELEMENTWISE_OPS(X)                                                                                      \
    INFINI_ELEMENTWISE_C_OPS(X)                                                                                        \
    X(GeGLU, geglu, 2, kFloats, "y", "up", "gate")

namespace infini::elementwise {

constexpr int kMaxTensors = 4; // an output and up to three inputs

enum class Op : int {
#define INFINI_OP(Name, name, ...) name,
    INFINI_ELEMENTWISE_OPS(INFINI_OP)
#undef INFINI_OP
};

enum class Dtypes {
    kFloats,  // F16, BF16, F32, F64
    kNumbers, // kFloats, I32 and I64
    kAll      // every dtype but the complex ones
};

// The names of an op and its tensors in messages, and the tensor that the others are compared with.
struct Names {
    const char *op;
    const char *tensors[kMaxTensors];
    int first;
};

struct Description {
    int inputs;
    Dtypes dtypes;
    Names names;
};

constexpr Description kOps[] = {
#define INFINI_OP(Name, name, inputs, dtypes, ...) {inputs, Dtypes::dtypes, {#name, {__VA_ARGS__}, 0}},
    INFINI_ELEMENTWISE_OPS(INFINI_OP)
#undef INFINI_OP
};

constexpr const Description &describe(Op op) {
    return kOps[static_cast<int>(op)];
}

// zeros and ones do not read their input: its dtype is free, and it needs no memory.
constexpr bool is_fill(Op op) {
    return op == Op::zeros || op == Op::ones;
}

// The bits of the number 1 in a dtype.
constexpr uint64_t bits_of_one(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_F8:
        return 0x38; // float8_e4m3fn
    case INFINI_DTYPE_F16:
        return 0x3c00;
    case INFINI_DTYPE_BF16:
        return 0x3f80;
    case INFINI_DTYPE_F32:
        return 0x3f800000;
    case INFINI_DTYPE_F64:
        return 0x3ff0000000000000;
    default: // the integers, and bool
        return 1;
    }
}

struct Args {
    Op op = Op::add;
    TensorView tensors[kMaxTensors]; // the output, then the inputs in the table's order, all of equal shape and dtype
    int numbers = 0;                 // how many of the last inputs are scalars: in host memory, with all strides 0
};

// Checks the arguments against the rules above.
void check(const Args &args, const Names &names);

// Checks the arguments, then computes the output.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::elementwise
