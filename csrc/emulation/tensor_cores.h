// Adds as tensor cores do: the products of a step are exact, but they are aligned to the largest summand and truncated
// there, and so is their sum. NVIDIA does not document this; published measurements for sm_80 found steps of 8
// products, one bit more than a float's 24, and truncation. sm_90 adds 16 products at a time with more bits, which
// loses less.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace infini::emulation {

constexpr int kStepProducts = 8;

// x truncated to float, towards zero.
inline float truncated(double x) {
    const auto nearest = static_cast<float>(x);
    return std::fabs(nearest) > std::fabs(x) && !std::isinf(nearest) ? std::nextafterf(nearest, 0.0f) : nearest;
}

inline double power_of_two(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// sum + the products of one step.
inline float add_step(float sum, const double (&products)[kStepProducts]) {
    double largest = std::fabs(static_cast<double>(sum)), plain = sum;
    for (const double product : products) {
        largest = largest < std::fabs(product) ? std::fabs(product) : largest;
        plain += product;
    }
    if (!std::isfinite(plain) || largest == 0) {
        return static_cast<float>(plain);
    }
    uint64_t bits;
    std::memcpy(&bits, &largest, sizeof bits);
    const int last = static_cast<int>(bits >> 52) - 1023 - 24; // keeps 25 bits of the largest summand
    const double scale = power_of_two(-last);
    int64_t total = static_cast<int64_t>(static_cast<double>(sum) * scale);
    for (const double product : products) {
        total += static_cast<int64_t>(product * scale);
    }
    return truncated(static_cast<double>(total) * power_of_two(last));
}

// sum + the products of k elements, step by step; product(i) is exact in a double.
template <typename Product> float add_products(float sum, int64_t k, const Product &product) {
    for (int64_t first = 0; first < k; first += kStepProducts) {
        double products[kStepProducts];
        for (int i = 0; i < kStepProducts; ++i) {
            products[i] = first + i < k ? product(first + i) : 0.0;
        }
        sum = add_step(sum, products);
    }
    return sum;
}

} // namespace infini::emulation
