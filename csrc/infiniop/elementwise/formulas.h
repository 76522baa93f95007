// The formulas of the elementwise ops; T is the dtype that the result is rounded to. of(VecF ...) serves half types and
// float, of(double ...) double; one template serves both if the code is the same. Included by elementwise_cpu.cpp after
// vec.h and by elementwise.cu after scalar_vec.cuh, where a VecF is one float. INFINI_FORMULA precedes each function.
// Errors, in units in the last place (ulp) of float, are the largest found; the elementwise tests assert them.
#pragma once

#include <cmath>
#include <type_traits>

namespace infini::INFINI_LEVEL {
namespace {

template <typename T> INFINI_FORMULA double exp_for(double x) {
    return std::exp(x);
}

template <typename T> INFINI_FORMULA double quotient_for(double a, double b) {
    return a / b;
}

// As for VecF: if either argument is NaN, returns the second one.
INFINI_FORMULA double max(double a, double b) {
    return a > b ? a : b;
}

INFINI_FORMULA double min(double a, double b) {
    return a < b ? a : b;
}

// log(1 + e) for 0 <= e <= 1, with the relative error of a few roundings down to the smallest e:
// 2 atanh(t), where t = e / (2 + e), by a minimax polynomial of relative error 5e-9.
template <typename T> INFINI_FORMULA VecF log1p_of_fraction(VecF e) {
    const VecF t = quotient_for<T>(e, e + splat(2.0f)), u = t * t;
    VecF p = splat(0.281782557f);
    p = fma(p, u, splat(0.279606226f));
    p = fma(p, u, splat(0.400249086f));
    p = fma(p, u, splat(0.666663147f));
    p = fma(p, u, splat(2.0f));
    return p * t;
}

// a + log(1 + e^x) in float for 0 <= a and x <= 0, to within 0.9 ulp. The logarithm is the series of log1p_of_fraction
// in t = 2 e / (2 + e), but the significant values are held as two floats, the first short enough for exact products.
INFINI_FORMULA VecF add_log1p_of_exp(VecF a, VecF x) {
    VecF rest;
    const VecF e = exp_and_rest(x, rest);
    const VecF half = splat(0.5f), inverse = splat(1.0f) / fma(e, half, splat(1.0f));
    const VecF high = leading_bits(e), low = (e - high) + rest;
    const VecF t = leading_bits(e * inverse), half_t = t * half;
    const VecF t_rest = (((e - t) - half_t * high) + (rest - half_t * low)) * inverse;
    const VecF whole = t + t_rest, u = whole * whole;
    VecF p = splat(5.50356557e-4f);
    p = fma(p, u, splat(2.18442364e-3f));
    p = fma(p, u, splat(1.25077839e-2f));
    p = fma(p, u, splat(8.33328934e-2f));
    const VecF larger = max(a, t), smaller = min(t, a), sum = larger + smaller;
    return sum + (fma(p * u, whole, t_rest) + (smaller - (sum - larger)));
}

// e^(-z^2 / 2) for 0 <= z <= 15, without the error of rounding z^2, which would be up to 100 ulp.
template <typename T> INFINI_FORMULA VecF gaussian(VecF z) {
    if constexpr (!std::is_same_v<T, float>) {
        return exp_for<T>(z * z * splat(-0.5f));
    } else {
        const VecF high = leading_bits(z);
        const VecF rest = (z - high) * (z + high) * splat(-0.5f);
        VecF p = splat(1.0f / 24); // e^rest for -0.06 < rest <= 0
        p = fma(p, rest, splat(1.0f / 6));
        p = fma(p, rest, splat(0.5f));
        p = fma(p, rest, splat(1.0f));
        p = fma(p, rest, splat(1.0f));
        return exp(high * high * splat(-0.5f)) * p;
    }
}

// The upper tail of the normal distribution at z, for 0 <= z <= 15, divided by e^(-z^2 / 2): G(q) / (z + 4), where q =
// (z - 4) / (z + 4), with a minimax polynomial G of relative error 9e-9.
template <typename T> INFINI_FORMULA VecF normal_tail(VecF z) {
    const VecF inverse = quotient_for<T>(splat(1.0f), z + splat(4.0f));
    const VecF q = (z - splat(4.0f)) * inverse;
    VecF p = splat(-1.34196397e-4f);
    p = fma(p, q, splat(1.74659144e-4f));
    p = fma(p, q, splat(1.56840829e-3f));
    p = fma(p, q, splat(-3.51021084e-3f));
    p = fma(p, q, splat(-7.52400432e-3f));
    p = fma(p, q, splat(6.04034895e-2f));
    p = fma(p, q, splat(-1.86523656e-1f));
    p = fma(p, q, splat(3.87136917e-1f));
    p = fma(p, q, splat(-6.0789658e-1f));
    p = fma(p, q, splat(7.55285135e-1f));
    return p * inverse;
}

// width times the upper tail of the normal distribution at z >= 0; beyond z = 15 it is 0 in float. For half types with
// AVX-512 the relative error is 2e-5.
template <typename T> INFINI_FORMULA VecF times_share_beyond(VecF width, VecF z) {
#if defined(__AVX512F__)
    if constexpr (!std::is_same_v<T, float>) {
        const VecF odds = exp_for<T>(log_odds(min(splat(kLogOddsEnd), z)));
        return width * odds / (splat(1.0f) + odds);
    }
#endif
    z = min(splat(15.0f), z);
    return width * normal_tail<T>(z) * gaussian<T>(z);
}

namespace formula {

struct add {
    template <typename T, typename V> INFINI_FORMULA static V of(V a, V b) { return a + b; }
};

struct sub {
    template <typename T, typename V> INFINI_FORMULA static V of(V a, V b) { return a - b; }
};

struct mul {
    template <typename T, typename V> INFINI_FORMULA static V of(V a, V b) { return a * b; }
};

// Returns low if low > high. Keeps NaN in x; a bound that is NaN has no effect.
struct clip {
    template <typename T, typename V> INFINI_FORMULA static V of(V x, V low, V high) { return max(low, min(high, x)); }
};

// Keeps NaN.
struct relu {
    template <typename T, typename V> INFINI_FORMULA static V of(V x) { return max(V{}, x); }
};

// x times the normal distribution function of x: x / 2 * (1 + erf(x / sqrt(2))). The vector form subtracts the upper
// tail at |x| from max(x, 0), so that the relative error stays small far below 0.
struct gelu {
    template <typename T> INFINI_FORMULA static VecF of(VecF x) {
        const VecF z = abs(x);
        const VecF width = max(-x, min(splat(15.0f), z)); // |x|, but 15 at infinity, and NaN at minus infinity
        return max(splat(0.0f), x) - times_share_beyond<T>(width, z);
    }
    template <typename T> INFINI_FORMULA static double of(double x) {
        return 0.5 * x * std::erfc(x * -0.70710678118654752440);
    }
};

struct sigmoid {
    template <typename T, typename V> INFINI_FORMULA static V of(V x) {
        return quotient_for<T>(V{} + 1.0f, 1.0f + exp_for<T>(-x));
    }
};

struct silu {
    template <typename T, typename V> INFINI_FORMULA static V of(V x) {
        return quotient_for<T>(x, 1.0f + exp_for<T>(-x));
    }
};

struct swiglu {
    template <typename T, typename V> INFINI_FORMULA static V of(V up, V gate) { return silu::of<T>(gate) * up; }
};

// gate / 2 * (1 + tanh(u)) * up, where u = sqrt(2 / pi) * (gate + 0.044715 gate^3). (1 + tanh(u)) / 2 is computed as 1
// / (1 + e^(-2u)), so the relative error stays small far below 0, and the cost is that of swiglu.
struct geglu {
    // -2u = gate * (kLinear + kCubic * gate^2).
    static constexpr double kLinear = -1.59576912160573071, kCubic = 0.044715 * kLinear;
    template <typename T> INFINI_FORMULA static VecF of(VecF up, VecF gate) {
        const VecF slope = fma(gate * gate, splat(static_cast<float>(kCubic)), splat(static_cast<float>(kLinear)));
        return quotient_for<T>(gate, 1.0f + exp_for<T>(gate * slope)) * up;
    }
    template <typename T> INFINI_FORMULA static double of(double up, double gate) {
        return gate / (1 + std::exp(gate * (kLinear + kCubic * gate * gate))) * up;
    }
};

// log(1 + e^x); x itself above 20.
struct softplus {
    template <typename T> INFINI_FORMULA static VecF of(VecF x) {
        VecF above;
        if constexpr (std::is_same_v<T, float>) {
            above = add_log1p_of_exp(max(splat(0.0f), x), -abs(x));
        } else {
            above = max(splat(0.0f), x) + log1p_of_fraction<T>(exp_for<T>(-abs(x)));
        }
        return select(x > splat(20.0f), x, above);
    }
    template <typename T> INFINI_FORMULA static double of(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
};

struct tanh {
    template <typename T> INFINI_FORMULA static VecF of(VecF x) { return tanh_for<T>(x); }
    template <typename T> INFINI_FORMULA static double of(double x) { return std::tanh(x); }
};

} // namespace formula
} // namespace
} // namespace infini::INFINI_LEVEL
