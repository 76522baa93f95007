// NVFP4 in panels.
#pragma once

#include "panel_kinds.h"

namespace infini::linear_block_panels {

INFINI_DECLARE_PANEL_KIND(nvfp4)

} // namespace infini::linear_block_panels
