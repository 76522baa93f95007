// The CUDA kernels of the elementwise ops: one kernel per number of inputs and dtype; the op is a uniform branch in it.
// Limit: memory bandwidth, each input read once and the output written once.
// SASS: map_elements: LDG.E.128 STG.E.128
#include "cuda/elementwise_map.cuh"
#include "elementwise.h"
#include "scalar_vec.cuh"

#include "formulas.h"

namespace infini::nvidia {
namespace {

using elementwise::Args;
using elementwise::Dtypes;
using elementwise::Op;

namespace formula {

// The fills (zeros, ones) copy a number to all elements.
struct zeros {
    template <typename T> static __device__ __forceinline__ T of(T number) { return number; }
};
using ones = zeros;

} // namespace formula

// Whether the op has a kernel for T. Unsigned integers serve all integers (overflow wraps around) and, if only an
// element's size matters, all dtypes.
template <typename T, Dtypes kDtypes>
constexpr bool serves = kDtypes == Dtypes::kAll       ? std::is_integral_v<T>
                        : kDtypes == Dtypes::kNumbers ? !std::is_integral_v<T> || sizeof(T) >= 4
                                                      : !std::is_integral_v<T>;

// The function that map() calls: applies the op's formula.
template <typename T, int kInputs> struct Formulas {
    Op op;

    template <typename Each> __device__ __forceinline__ void operator()(const Each &each) const {
        switch (op) {
#define INFINI_OP(Name, name, inputs, dtypes, ...)                                                                     \
    case Op::name:                                                                                                     \
        if constexpr (kInputs == inputs && serves<T, Dtypes::dtypes>) {                                                \
            each([](auto... x) { return cuda::narrow<T>(formula::name::of<T>(cuda::widen(x)...)); });                  \
        }                                                                                                              \
        return;
            INFINI_ELEMENTWISE_OPS(INFINI_OP)
#undef INFINI_OP
        }
    }
};

template <typename T, int kInputs> void run(const ExecutionContext &context, const Args &args) {
    TensorView views[kInputs + 1];
    for (int t = 0; t <= kInputs; ++t) {
        views[t] = args.tensors[t];
    }
    cuda::map<T, kInputs>(context, views, args.numbers, Formulas<T, kInputs>{args.op});
}

template <typename T> void fill(const ExecutionContext &context, const Args &args) {
    auto bits = static_cast<T>(args.op == Op::ones ? elementwise::bits_of_one(args.tensors[0].dtype) : 0);
    TensorView number = args.tensors[0];
    number.data = &bits;
    for (int64_t &stride : number.strides) {
        stride = 0;
    }
    TensorView views[] = {args.tensors[0], number};
    cuda::map<T, 1>(context, views, 1, Formulas<T, 1>{args.op});
}

void fill(const ExecutionContext &context, const Args &args) {
    switch (size_of(args.tensors[0].dtype)) {
    case 1:
        return fill<uint8_t>(context, args);
    case 2:
        return fill<uint16_t>(context, args);
    case 4:
        return fill<uint32_t>(context, args);
    default:
        return fill<uint64_t>(context, args);
    }
}

} // namespace
} // namespace infini::nvidia

namespace infini::elementwise {
namespace {

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    using namespace infini::nvidia;
    if (is_fill(args.op)) {
        return fill(context, args);
    }
    const int inputs = describe(args.op).inputs;
    if (args.tensors[0].dtype == INFINI_DTYPE_I32) { // add on integers, as below
        return infini::nvidia::run<uint32_t, 2>(context, args);
    }
    if (args.tensors[0].dtype == INFINI_DTYPE_I64) {
        return infini::nvidia::run<uint64_t, 2>(context, args);
    }
    cuda::with_float_type(args.tensors[0].dtype, [&](auto value) {
        using T = decltype(value);
        inputs == 1   ? infini::nvidia::run<T, 1>(context, args)
        : inputs == 2 ? infini::nvidia::run<T, 2>(context, args)
                      : infini::nvidia::run<T, 3>(context, args);
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::elementwise
