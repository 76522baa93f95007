// nn::Embedding.
#include "infinicore/nn/embedding.hpp"

#include "../error.h"
#include "infinicore/ops/embedding.hpp"

namespace infinicore::nn {

Embedding::Embedding(size_t num_embeddings, size_t embedding_dim, std::optional<int64_t> padding_idx,
                     const DataType &dtype, const Device &device)
    : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim), padding_idx_(padding_idx), dtype_(dtype) {
    device_ = device;
    INFINICORE_NN_PARAMETER_INIT(weight, ({num_embeddings, embedding_dim}, dtype, device));
    if (padding_idx) {
        const auto rows = static_cast<int64_t>(num_embeddings);
        if (*padding_idx < -rows || *padding_idx >= rows) {
            fail("infinicore::nn::Embedding: padding_idx must be from ", -rows, " to ", rows - 1, ", got ",
                 *padding_idx);
        }
        padding_idx_ = *padding_idx + (*padding_idx < 0 ? rows : 0);
        weight_->narrow({{0, static_cast<Size>(*padding_idx_), 1}})
            ->copy_from(Tensor::zeros({1, embedding_dim}, dtype, device));
    }
}

Tensor Embedding::forward(const Tensor &indices) const {
    return op::embedding(indices, weight_);
}

std::string Embedding::extra_repr() const {
    const std::string padding = padding_idx_ ? message(", padding_idx=", *padding_idx_) : std::string();
    return message("num_embeddings=", num_embeddings_, ", embedding_dim=", embedding_dim_, padding,
                   ", dtype=", toString(dtype_));
}

} // namespace infinicore::nn
