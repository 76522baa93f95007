// Sums over a row, in an order that depends on the row's length alone.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Sums over a row of n elements: body(i, lanes, sum) returns sum plus the vector at i. Four partial sums hide the
// latency of the additions.
template <typename Body> float sum_over(int64_t n, const Body &body) {
    VecF a = {}, b = {}, c = {}, d = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        a = body(i, Full{}, a);
        b = body(i + kLanes, Full{}, b);
        c = body(i + 2 * kLanes, Full{}, c);
        d = body(i + 3 * kLanes, Full{}, d);
    }
    for_each_vector(n - i, [&](int64_t j, auto lanes) { a = body(i + j, lanes, a); });
    return sum((a + b) + (c + d));
}

} // namespace
} // namespace infini::INFINI_LEVEL
