// nn::Linear and its tensor-parallel forms: x W^T + b.
// Features and names are those of the whole layer; weight() and bias() are this rank's shards.
#pragma once

#include <string>

#include <infiniccl.h>

#include "module.hpp"

namespace infinicore::nn {

// Base of the linear modules. It creates no weight: a derived class registers weight_ [out, in] and bias_.
class BaseLinear : public Module {
public:
    BaseLinear(size_t in_features, size_t out_features, bool bias = true, const DataType &dtype = DataType::F32,
               const Device &device = Device());

    virtual Tensor forward(Tensor &input) const;
    // forward(input) + residual.
    Tensor forward(Tensor &input, Tensor &residual) const;

    size_t in_features() const { return in_features_; }
    size_t out_features() const { return out_features_; }
    bool has_bias() const { return has_bias_; }
    DataType dtype() const { return dtype_; }
    Tensor weight() const { return weight_; }
    Tensor bias() const { return bias_; } // empty without a bias

protected:
    INFINICORE_NN_PARAMETER(weight);
    INFINICORE_NN_PARAMETER(bias);

    // input weight^T + bias, of this rank alone.
    Tensor compute_linear(Tensor &input) const;

    // "in_features=8, out_features=4, bias=true, dtype=F32".
    std::string features_repr() const;

    size_t in_features_;
    size_t out_features_;
    bool has_bias_;
    DataType dtype_;
};

class Linear : public BaseLinear {
public:
    Linear(size_t in_features, size_t out_features, bool bias = true, const DataType &dtype = DataType::F32,
           const Device &device = Device());

    using BaseLinear::forward;
    Tensor forward(Tensor &input) const override;
    std::string extra_repr() const;
};

// Each rank has a shard of the output features, of weight and bias; forward computes that part of the result.
class ColumnParallelLinear : public BaseLinear {
public:
    ColumnParallelLinear(size_t in_features, size_t out_features, bool bias = true,
                         const DataType &dtype = DataType::F32, const Device &device = Device(), Size tp_rank = 0,
                         Size tp_size = 1);

    using BaseLinear::forward;
    Tensor forward(Tensor &input) const override;
    std::string extra_repr() const;

protected:
    Size tp_rank_ = 0;
    Size tp_size_ = 1;
};

// Each rank has a shard of the input features; forward takes that part of the input and all-reduces the ranks' products
// if there is a communicator. Without one the result is this rank's term. The bias is loaded on every rank, and added
// by rank 0.
class RowParallelLinear : public BaseLinear {
public:
    RowParallelLinear(size_t in_features, size_t out_features, bool bias = true, const DataType &dtype = DataType::F32,
                      const Device &device = Device(), Size tp_rank = 0, Size tp_size = 1,
                      infinicclComm_t communicator = nullptr);

    using BaseLinear::forward;
    Tensor forward(Tensor &input) const override;
    std::string extra_repr() const;

protected:
    Size tp_rank_ = 0;
    Size tp_size_ = 1;
    infinicclComm_t communicator_ = nullptr;
};

} // namespace infinicore::nn
