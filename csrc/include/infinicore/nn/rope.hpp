// nn::RoPE: rotary position embedding with tables [max_seq_len, head_dim / 2] of sines and cosines that are computed in
// double and rounded once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "module.hpp"

namespace infinicore::nn {

class RoPE : public Module {
public:
    // Which columns of a head form a pair: GPT_J (2i, 2i + 1), GPT_NEOX (i, i + head_dim / 2).
    enum class Algo { GPT_J = 0, GPT_NEOX = 1 };

    enum class ScalingType { DEFAULT = 0, LONGROPE = 1 };

    // How frequencies are changed for a longer context than the model was trained on.
    class ScalingConfig {
    public:
        virtual ~ScalingConfig() = default;
        ScalingType type() const { return type_; }

    protected:
        explicit ScalingConfig(ScalingType type) : type_(type) {}
        ScalingType type_;
    };

    // LongRoPE (Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024): frequency i is
    // divided by long_factor[i], or by short_factor[i] where the tables reach no further than the original length.
    // Sines and cosines are multiplied by sqrt(1 + ln(scale) / ln(original length)); scale is `factor`, or where that
    // is 1 the tables' length divided by the original one. A scale of at most 1 multiplies by 1.
    class LongRopeConfig : public ScalingConfig {
    public:
        LongRopeConfig(std::vector<float> short_factor, std::vector<float> long_factor,
                       size_t original_max_position_embeddings, float factor = 1.0f);
        ~LongRopeConfig() override = default;

        size_t original_max_position_embeddings() const { return original_max_position_embeddings_; }
        const std::vector<float> &short_factor() const { return short_factor_; }
        const std::vector<float> &long_factor() const { return long_factor_; }
        float factor() const { return factor_; }

    protected:
        std::vector<float> short_factor_;
        std::vector<float> long_factor_;
        size_t original_max_position_embeddings_;
        float factor_;
    };

    RoPE(size_t head_dim, size_t max_seq_len, double theta = 10000.0, Algo algo = Algo::GPT_J,
         const DataType &dtype = DataType::F32, const Device &device = Device(),
         std::shared_ptr<ScalingConfig> scaling = nullptr);

    // x [seq, heads, head_dim] or [batch, seq, heads, head_dim] rotated by the positions pos [seq] or [batch, seq]: as
    // a new tensor, in x itself, or in y.
    Tensor forward(const Tensor &x, const Tensor &pos, bool in_place = false) const;
    Tensor forward(const Tensor &y, const Tensor &x, const Tensor &pos) const;

    size_t head_dim() const { return head_dim_; }
    size_t max_seq_len() const { return max_seq_len_; }
    double theta() const { return theta_; }
    Algo algo() const { return algo_; }
    DataType dtype() const { return dtype_; }
    std::string extra_repr() const;

protected:
    INFINICORE_NN_BUFFER(sin_cache);
    INFINICORE_NN_BUFFER(cos_cache);

private:
    void make_tables();

    size_t head_dim_;
    size_t max_seq_len_;
    double theta_;
    Algo algo_;
    DataType dtype_;
    std::shared_ptr<ScalingConfig> scaling_;
};

} // namespace infinicore::nn
