// Blocks of 4-bit codes with a scale and a zero point, as AWQ's and GPTQ's groups, in panels.
#pragma once

#include "panel_kinds.h"

namespace infini::linear_block_panels {

INFINI_DECLARE_PANEL_KIND(int4_32)
INFINI_DECLARE_PANEL_KIND(int4_64)
INFINI_DECLARE_PANEL_KIND(int4_128)

} // namespace infini::linear_block_panels
