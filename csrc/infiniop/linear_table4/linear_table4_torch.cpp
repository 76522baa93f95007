// torch.ops.infini.linear_table4 and quantize_table4, declared in torch_infini/ops/linear_table4.py and quantize_table4.py.
#include "linear_table4.h"
#include "panel_weights/panel_torch.h"

namespace infini::linear_table4 {

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear_table4", INFINI_BOX(panels::linear<kOp>));
    m.impl("linear_table4.out", INFINI_BOX(panels::linear_out<kOp>));
}

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("quantize_table4", INFINI_BOX(panels::quantize<kOp>));
}

} // namespace infini::linear_table4
