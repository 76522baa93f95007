// attention: copies k and v, [Hkv, seq, dim], to rows pos to pos + seq - 1 of the caches, [Hkv, rows, dim]; then
// out [seq, H, dim] = softmax(q k^T / sqrt(dim) + causal mask) v for q [H, seq, dim] over the rows up to its own.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class Attention {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, size_t);
    static void execute(Tensor out, Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos);
void attention_(Tensor out, Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos);

} // namespace infinicore::op
