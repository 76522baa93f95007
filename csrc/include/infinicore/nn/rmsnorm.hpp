// nn::RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension.
#pragma once

#include <string>

#include "module.hpp"

namespace infinicore::nn {

class RMSNorm : public Module {
public:
    // The weight [normalized_shape] is ones until it is loaded.
    RMSNorm(size_t normalized_shape, double eps = 1e-6, const DataType &dtype = DataType::F32,
            const Device &device = Device());

    Tensor forward(const Tensor &x) const;

    size_t normalized_shape() const { return normalized_shape_; }
    double eps() const { return eps_; }
    DataType dtype() const { return dtype_; }
    std::string extra_repr() const;
    Tensor weight() const { return weight_; }

protected:
    INFINICORE_NN_PARAMETER(weight);

private:
    size_t normalized_shape_;
    double eps_;
    DataType dtype_;
};

} // namespace infinicore::nn
