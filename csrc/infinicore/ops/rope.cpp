// rope, by libinfiniop's RoPE.
#include "infinicore/ops/rope.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateRoPEDescriptor, infiniopGetRoPEWorkspaceSize, infiniopRoPE, infiniopDestroyRoPEDescriptor>;

void compute(Tensor x_out, const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table,
             nn::RoPE::Algo algo) {
    Operator::call(
        "rope",
        {{"x_out", x_out, Argument::Write}, {"x", x}, {"pos", pos}, {"sin_table", sin_table}, {"cos_table", cos_table}},
        std::tuple{static_cast<infiniopRoPEAlgo_t>(algo)});
}

} // namespace

common::OpDispatcher<RoPE::schema> &RoPE::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("rope", compute);
    return *dispatcher;
}

void RoPE::execute(Tensor x_out, const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table,
                   nn::RoPE::Algo algo) {
    dispatch(dispatcher(), compute, "rope", x_out, std::move(x_out), x, pos, sin_table, cos_table, std::move(algo));
}

void rope_(Tensor x_out, const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table,
           nn::RoPE::Algo algo) {
    RoPE::execute(std::move(x_out), x, pos, sin_table, cos_table, algo);
}

Tensor rope(const Tensor &x, const Tensor &pos, const Tensor &sin_table, const Tensor &cos_table, nn::RoPE::Algo algo) {
    Tensor x_out = result_like("rope", "x", x);
    rope_(x_out, x, pos, sin_table, cos_table, algo);
    return x_out;
}

static_assert(static_cast<int>(nn::RoPE::Algo::GPT_J) == INFINIOP_ROPE_ALGO_GPT_J &&
              static_cast<int>(nn::RoPE::Algo::GPT_NEOX) == INFINIOP_ROPE_ALGO_GPT_NEOX);

} // namespace infinicore::op
