// INFINI_DEFINE_PANEL_KIND(name, description): the kernels of a kind of panel, at levels that have them: panel_codes.h
// where bfloat16 is multiplied in pairs, panel_integers.h on other CPUs with AVX2; elsewhere they do nothing, and
// linear_blocks serves.
#pragma once

#include "panel_codes.h"
#include "panel_integers.h"

#if defined(INFINI_BF16_PANELS) || defined(INFINI_INTEGER_PANELS)

#define INFINI_DEFINE_PANEL_KIND(name, ...)                                                                            \
    void dot_##name(const DotArgs &args) {                                                                             \
        dot_panel<__VA_ARGS__>(args);                                                                                  \
    }                                                                                                                  \
    void decode_##name(const DecodeArgs &args) {                                                                       \
        decode_panel<__VA_ARGS__>(args);                                                                               \
    }

#else

#define INFINI_DEFINE_PANEL_KIND(name, ...)                                                                            \
    void dot_##name(const DotArgs &) {}                                                                                \
    void decode_##name(const DecodeArgs &) {}

#endif
