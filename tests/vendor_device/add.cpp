// The vendor's kernel of the elementwise ops, of which it has but add: one table serves them all.
#include "elementwise/elementwise.h"
#include "kernels.h"

namespace {

using infini::ExecutionContext;
using infini::elementwise::Args;

void elementwise_on_qy(const ExecutionContext &context, const Args &args) {
    if (args.op != infini::elementwise::Op::add) {
        throw infini::Error(INFINI_STATUS_NOT_IMPLEMENTED,
                            infini::message("infini::", describe(args.op).names.op, ": no kernel for qy"));
    }
    const infini::TensorView &c = args.tensors[0], &a = args.tensors[1], &b = args.tensors[2];
    qy::begin("add", context, c.dtype);
    for (int64_t i = 0; i < c.numel(); ++i) {
        c.as<float>()[qy::offset_of(c, c.ndim, i)] =
            a.as<const float>()[qy::offset_of(a, a.ndim, i)] + b.as<const float>()[qy::offset_of(b, b.ndim, i)];
    }
}

const infini::RegisteredKernel<Args> registered{infini::elementwise::kernels, INFINI_DEVICE_QY, elementwise_on_qy};

} // namespace
