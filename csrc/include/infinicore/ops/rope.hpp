// rope: rotates each pair of a head's columns by its token's angle: x [seq, heads, dim] or [batch, seq, heads, dim];
// pos has each token's row of the tables [max positions, dim / 2]. In place.
#pragma once

#include "../nn/rope.hpp"
#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class RoPE {
public:
    using schema = void (*)(Tensor, const Tensor &, const Tensor &, const Tensor &, const Tensor &, nn::RoPE::Algo);
    static void execute(Tensor x_out, const Tensor &x, const Tensor &pos, const Tensor &sin_table,
                        const Tensor &cos_table, nn::RoPE::Algo algo);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor rope(const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table, nn::RoPE::Algo algo);
void rope_(Tensor x_out, const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table,
           nn::RoPE::Algo algo);

} // namespace infinicore::op
