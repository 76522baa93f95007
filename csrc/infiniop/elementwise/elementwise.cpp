// The rules of the elementwise ops, and the call of their kernel.
#include "elementwise.h"

#include "check.h"

namespace infini::elementwise {

KernelTable<Args> kernels{"elementwise"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check(const Args &args, const Names &names) {
    const Checker rule(names.op);
    const Description &op = describe(args.op);
    const TensorView &out = args.tensors[0], &first = args.tensors[names.first];
    const char *const out_name = names.tensors[0], *const first_name = names.tensors[names.first];
    switch (op.dtypes) {
    case Dtypes::kFloats:
        rule.dtype(first_name, first, INFINI_FLOATS_AND_DOUBLE);
        break;
    case Dtypes::kNumbers:
        rule.dtype(first_name, first,
                   {INFINI_DTYPE_F32, INFINI_DTYPE_BF16, INFINI_DTYPE_F16, INFINI_DTYPE_F64, INFINI_DTYPE_I32,
                    INFINI_DTYPE_I64});
        break;
    case Dtypes::kAll: // the fills accept any dtype
        rule.dtype(out_name, out,
                   {INFINI_DTYPE_BYTE, INFINI_DTYPE_BOOL, INFINI_DTYPE_I8, INFINI_DTYPE_I16, INFINI_DTYPE_I32,
                    INFINI_DTYPE_I64, INFINI_DTYPE_U8, INFINI_DTYPE_U16, INFINI_DTYPE_U32, INFINI_DTYPE_U64,
                    INFINI_DTYPE_F8, INFINI_DTYPE_F16, INFINI_DTYPE_F32, INFINI_DTYPE_F64, INFINI_DTYPE_BF16});
        break;
    }
    for (int t = 0; t <= op.inputs; ++t) {
        rule.same_shape(names.tensors[t], args.tensors[t], first_name, first);
        if (!is_fill(args.op)) {
            rule.same_dtype(names.tensors[t], args.tensors[t], first_name, first);
        }
    }
    rule.writable(out_name, out);
    for (int t = 1; t <= op.inputs && !is_fill(args.op); ++t) {
        rule.no_partial_overlap(out_name, out, names.tensors[t], args.tensors[t]);
    }
}

void run(const ExecutionContext &context, const Args &args, const Names &names) {
    check(args, names);
    if (args.tensors[0].numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::elementwise
