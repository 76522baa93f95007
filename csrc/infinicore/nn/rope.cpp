// nn::RoPE: its tables, and how LongRoPE scales them.
#include "infinicore/nn/rope.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../error.h"
#include "infinicore/ops/rope.hpp"

namespace infinicore::nn {

namespace {

// Rounds x to a 16-bit floating-point format, ties to even. Rounding to float first could round twice.
uint16_t to_half(double x, int fraction_bits, int bias) {
    const int exponent = std::max(x == 0 ? 1 - bias : std::ilogb(x), 1 - bias); // denormals have the least exponent
    const auto fraction = static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(x), fraction_bits - exponent)));
    // A fraction of 2^fraction_bits or more carries into the exponent.
    const uint32_t bits = fraction + (static_cast<uint32_t>(exponent + bias - 1) << fraction_bits);
    const uint32_t infinity = static_cast<uint32_t>(2 * bias + 1) << fraction_bits;
    return static_cast<uint16_t>((std::signbit(x) ? 0x8000u : 0u) | std::min(bits, infinity));
}

void store(double x, DataType dtype, std::byte *to) {
    if (dtype == DataType::F64) {
        std::memcpy(to, &x, sizeof x);
    } else if (dtype == DataType::F32) {
        const auto narrow = static_cast<float>(x);
        std::memcpy(to, &narrow, sizeof narrow);
    } else {
        const uint16_t narrow = dtype == DataType::F16 ? to_half(x, 10, 15) : to_half(x, 7, 127);
        std::memcpy(to, &narrow, sizeof narrow);
    }
}

} // namespace

RoPE::LongRopeConfig::LongRopeConfig(std::vector<float> short_factor, std::vector<float> long_factor,
                                     size_t original_max_position_embeddings, float factor)
    : ScalingConfig(ScalingType::LONGROPE), short_factor_(std::move(short_factor)),
      long_factor_(std::move(long_factor)), original_max_position_embeddings_(original_max_position_embeddings),
      factor_(factor) {
    if (original_max_position_embeddings < 2) { // log(1) would be a zero divisor
        fail("infinicore::nn::RoPE::LongRopeConfig: original_max_position_embeddings must be at least 2, got ",
             original_max_position_embeddings);
    }
    if (!(factor > 0) || !std::isfinite(factor)) {
        fail("infinicore::nn::RoPE::LongRopeConfig: factor must be finite and above 0, got ", factor);
    }
    for (const std::vector<float> *const factors : {&short_factor_, &long_factor_}) {
        for (const float value : *factors) {
            if (!(value > 0) || !std::isfinite(value)) {
                fail("infinicore::nn::RoPE::LongRopeConfig: ",
                     factors == &short_factor_ ? "short_factor" : "long_factor",
                     " must have finite numbers above 0, got ", value);
            }
        }
    }
}

RoPE::RoPE(size_t head_dim, size_t max_seq_len, double theta, Algo algo, const DataType &dtype, const Device &device,
           std::shared_ptr<ScalingConfig> scaling)
    : head_dim_(head_dim), max_seq_len_(max_seq_len), theta_(theta), algo_(algo), dtype_(dtype),
      scaling_(std::move(scaling)) {
    if (head_dim == 0 || head_dim % 2 != 0) {
        fail("infinicore::nn::RoPE: head_dim must be even and above 0, got ", head_dim);
    }
    if (!(theta > 0) || !std::isfinite(theta)) {
        fail("infinicore::nn::RoPE: theta must be finite and above 0, got ", theta);
    }
    if (dtype != DataType::F16 && dtype != DataType::BF16 && dtype != DataType::F32 && dtype != DataType::F64) {
        fail("infinicore::nn::RoPE: dtype must be ", toString(DataType::F16), ", ", toString(DataType::BF16), ", ",
             toString(DataType::F32), " or ", toString(DataType::F64), ", got ", toString(dtype));
    }
    device_ = device;
    INFINICORE_NN_BUFFER_INIT(sin_cache, ({max_seq_len, head_dim / 2}, dtype, device));
    INFINICORE_NN_BUFFER_INIT(cos_cache, ({max_seq_len, head_dim / 2}, dtype, device));
    make_tables();
}

void RoPE::make_tables() {
    const size_t pairs = head_dim_ / 2, size = dsize(dtype_);
    std::vector<double> frequencies(pairs);
    for (size_t i = 0; i < pairs; ++i) {
        frequencies[i] = std::pow(theta_, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim_));
    }
    double magnitude = 1.0;
    if (scaling_ != nullptr && scaling_->type() == ScalingType::LONGROPE) {
        const auto &config = dynamic_cast<const LongRopeConfig &>(*scaling_);
        const auto original = static_cast<double>(config.original_max_position_embeddings());
        const bool is_long = max_seq_len_ > config.original_max_position_embeddings();
        const std::vector<float> &factors = is_long ? config.long_factor() : config.short_factor();
        if (factors.size() != pairs) {
            fail("infinicore::nn::RoPE: ", is_long ? "long_factor" : "short_factor", " must have ", pairs,
                 " numbers, one for each pair of columns, got ", factors.size());
        }
        for (size_t i = 0; i < pairs; ++i) {
            frequencies[i] /= static_cast<double>(factors[i]);
        }
        const double scale = config.factor() == 1.0f ? static_cast<double>(max_seq_len_) / original : config.factor();
        magnitude = scale > 1 ? std::sqrt(1 + std::log(scale) / std::log(original)) : 1.0;
    }
    std::vector<std::byte> sines(max_seq_len_ * pairs * size), cosines(sines.size());
    for (size_t position = 0; position < max_seq_len_; ++position) {
        for (size_t i = 0; i < pairs; ++i) {
            const double angle = static_cast<double>(position) * frequencies[i];
            const size_t at = (position * pairs + i) * size;
            store(magnitude * std::sin(angle), dtype_, &sines[at]);
            store(magnitude * std::cos(angle), dtype_, &cosines[at]);
        }
    }
    sin_cache_.load_blob(sines.data());
    cos_cache_.load_blob(cosines.data());
}

Tensor RoPE::forward(const Tensor &x, const Tensor &pos, bool in_place) const {
    return in_place ? forward(x, x, pos) : op::rope(x, pos, sin_cache_, cos_cache_, algo_);
}

Tensor RoPE::forward(const Tensor &y, const Tensor &x, const Tensor &pos) const {
    op::rope_(y, x, pos, sin_cache_, cos_cache_, algo_);
    return y;
}

std::string RoPE::extra_repr() const {
    const bool is_long = scaling_ != nullptr && scaling_->type() == ScalingType::LONGROPE;
    return message("head_dim=", head_dim_, ", max_seq_len=", max_seq_len_, ", theta=", theta_,
                   ", algo=", algo_ == Algo::GPT_J ? "GPT_J" : "GPT_NEOX", ", dtype=", toString(dtype_),
                   is_long ? ", scaling=LONGROPE" : "");
}

} // namespace infinicore::nn
