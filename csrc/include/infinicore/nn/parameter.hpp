// nn::Parameter: a tensor that a module owns and a checkpoint fills, whole or as this rank's shard.
#pragma once

#include <string>

#include "../tensor.hpp"

namespace infinicore::nn {

class Parameter : public Tensor {
public:
    Parameter() = default;

    // The tensor is this rank's shard. It is shared, not copied: a view of a fused weight stays a view.
    Parameter(const Tensor &tensor, Size tp_dim = 0, Size tp_rank = 0, Size tp_size = 1);

    // `shape` is that of the whole tensor: the shard's size in tp_dim is that divided by tp_size, without a remainder.
    // The memory is uninitialized until it is loaded.
    Parameter(const Shape &shape, const DataType &dtype, const Device &device, Size tp_dim = 0, Size tp_rank = 0,
              Size tp_size = 1);

    // Copies this rank's shard of the whole tensor, which is contiguous in host memory at `data` and not used
    // afterwards.
    void load_blob(const void *data);

    // Copies this rank's shard of the whole tensor, which may have any strides and be on any device. Its dtype must be
    // the parameter's.
    void load(const Tensor &tensor);

protected:
    Size tp_dim_ = 0;
    Size tp_rank_ = 0;
    Size tp_size_ = 1;

private:
    friend class Module;

    // load() and load_blob() with the beginning of error messages: the function and the parameter's name.
    void load(const std::string &who, const Tensor &tensor, bool accepts_shard);
    void load_blob(const std::string &who, const void *data);
    Shape whole_shape() const;
};

} // namespace infinicore::nn
