// GGML's kinds of few bits in panels.
#pragma once

#include "panel_kinds.h"

namespace infini::linear_block_panels {

INFINI_DECLARE_PANEL_KIND(q2_k)
INFINI_DECLARE_PANEL_KIND(q3_k)
INFINI_DECLARE_PANEL_KIND(iq4_xs)

} // namespace infini::linear_block_panels
