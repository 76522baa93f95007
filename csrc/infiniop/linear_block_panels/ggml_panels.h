// GGML's kinds of blocks in panels.
#pragma once

#include "panel_kinds.h"

namespace infini::linear_block_panels {

INFINI_DECLARE_PANEL_KIND(q4_0)
INFINI_DECLARE_PANEL_KIND(q4_1)
INFINI_DECLARE_PANEL_KIND(q5_0)
INFINI_DECLARE_PANEL_KIND(q5_1)
INFINI_DECLARE_PANEL_KIND(q8_0)
INFINI_DECLARE_PANEL_KIND(q4_k)
INFINI_DECLARE_PANEL_KIND(q5_k)
INFINI_DECLARE_PANEL_KIND(q6_k)
INFINI_DECLARE_PANEL_KIND(iq4_nl)
INFINI_DECLARE_PANEL_KIND(mxfp4)

} // namespace infini::linear_block_panels
