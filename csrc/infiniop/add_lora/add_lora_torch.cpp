// torch.ops.infini.add_lora, which writes into y; declared in torch_infini/ops/add_lora.py.
#include "../../torch/tensor.h"
#include "add_lora.h"

namespace infini::add_lora {
namespace {

constexpr Checker kRule("add_lora");

void add_lora(const ExecutionContext &context, Tensor y, const Tensor &x, const Tensor &a, const Tensor &b,
              const Tensor &index) {
    Args args;
    args.y = view(context, kRule, "y", y);
    args.x = view(context, kRule, "x", x);
    args.a = view(context, kRule, "a", a);
    args.b = view(context, kRule, "b", b);
    args.index = view(context, kRule, "index", index);
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("add_lora", INFINI_BOX(add_lora));
}

} // namespace infini::add_lora
