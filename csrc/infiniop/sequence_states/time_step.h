// The time step of state space layers, in float: dt + bias, through softplus and limited, as asked for. Shared by ssd and
// selective_scan. Included by *_cpu.cpp files after vec.h.
#pragma once

#include "vec.h"

#include "elementwise/log_odds.h"

#define INFINI_FORMULA inline
#include "elementwise/formulas.h"

namespace infini::INFINI_LEVEL {
namespace {

struct TimeStep {
    bool softplus;
    float low, high;

    VecF of(VecF dt, VecF bias) const {
        dt = dt + bias;
        if (softplus) { // x itself above 20, as torch's
            const VecF above = max(splat(0.0f), dt) + log1p_of_fraction<float>(exp(-abs(dt)));
            dt = select(dt > splat(20.0f), dt, above);
        }
        return min(splat(high), max(splat(low), dt)); // which keeps NaN
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
