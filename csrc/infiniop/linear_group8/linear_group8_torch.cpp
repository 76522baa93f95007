// torch.ops.infini.linear_group8 and quantize_group8, declared in torch_infini/ops/linear_group8.py and quantize_group8.py.
#include "linear_group8.h"
#include "panel_weights/panel_torch.h"

namespace infini::linear_group8 {

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear_group8", INFINI_BOX(panels::linear<kOp>));
    m.impl("linear_group8.out", INFINI_BOX(panels::linear_out<kOp>));
}

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("quantize_group8", INFINI_BOX(panels::quantize<kOp>));
}

} // namespace infini::linear_group8
