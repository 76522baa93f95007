// nn::Embedding: the rows of a table [num_embeddings, embedding_dim] at given indices.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "module.hpp"

namespace infinicore::nn {

class Embedding : public Module {
public:
    // padding_idx: the row is zeros until the weight is loaded; a negative one counts from the end.
    Embedding(size_t num_embeddings, size_t embedding_dim, std::optional<int64_t> padding_idx = std::nullopt,
              const DataType &dtype = DataType::F32, const Device &device = Device());

    // indices [...] on the weight's device or on the CPU; the result is [..., embedding_dim] on the weight's device.
    Tensor forward(const Tensor &indices) const;

    size_t num_embeddings() const { return num_embeddings_; }
    size_t embedding_dim() const { return embedding_dim_; }
    std::optional<int64_t> padding_idx() const { return padding_idx_; } // from 0
    DataType dtype() const { return dtype_; }
    std::string extra_repr() const;
    Tensor weight() const { return weight_; }

protected:
    INFINICORE_NN_PARAMETER(weight);

private:
    size_t num_embeddings_;
    size_t embedding_dim_;
    std::optional<int64_t> padding_idx_;
    DataType dtype_;
};

} // namespace infinicore::nn
