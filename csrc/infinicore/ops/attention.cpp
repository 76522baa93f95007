// attention, by libinfiniop's Attention.
#include "infinicore/ops/attention.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateAttentionDescriptor, infiniopGetAttentionWorkspaceSize, infiniopAttention,
                           infiniopDestroyAttentionDescriptor>;

void compute(Tensor out, Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos) {
    Operator::call("attention",
                   {{"out", out, Argument::Write},
                    {"q", q},
                    {"k", k},
                    {"v", v},
                    {"k_cache", k_cache, Argument::ReadWrite},
                    {"v_cache", v_cache, Argument::ReadWrite}},
                   std::tuple{pos});
}

} // namespace

common::OpDispatcher<Attention::schema> &Attention::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("attention", compute);
    return *dispatcher;
}

void Attention::execute(Tensor out, Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos) {
    dispatch(dispatcher(), compute, "attention", out, std::move(out), std::move(q), std::move(k), std::move(v),
             std::move(k_cache), std::move(v_cache), std::move(pos));
}

void attention_(Tensor out, Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos) {
    Attention::execute(std::move(out), std::move(q), std::move(k), std::move(v), std::move(k_cache), std::move(v_cache),
                       pos);
}

Tensor attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, size_t pos) {
    if (present("attention", "q", q)->ndim() != 3) {
        fail("infinicore::attention: q must have 3 dimensions [heads, seq, dim], got ", q->info());
    }
    Tensor out = new_result("attention", "q", q, {q->size(1), q->size(0), q->size(2)}, q->dtype());
    attention_(out, std::move(q), std::move(k), std::move(v), std::move(k_cache), std::move(v_cache), pos);
    return out;
}

} // namespace infinicore::op
