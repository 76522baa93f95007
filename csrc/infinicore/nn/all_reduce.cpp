// The all-reduce of the tensor-parallel modules, on the calling thread's stream.
#include "all_reduce.h"

#include "../error.h"
#include "../thread_state.h"
#include "infinicore/context/context.hpp"

namespace infinicore::nn {

namespace {

struct Planned {
    graph::GraphTensor x;
    infinicclComm_t communicator;
};

void *plan(Tensor x, infinicclComm_t communicator) {
    return new Planned{graph::GraphTensor(x), communicator};
}

void run(void *planned_meta) {
    auto &planned = *static_cast<Planned *>(planned_meta);
    planned.x.resume();
    context::setDevice(planned.x->device());
    check(infinicclAllReduce(planned.x->data(), planned.x->data(), planned.x->numel(),
                             static_cast<infiniDtype_t>(planned.x->dtype()), INFINICCL_SUM, planned.communicator,
                             own_stream()));
}

void cleanup(void **planned_meta) {
    delete static_cast<Planned *>(*planned_meta);
    *planned_meta = nullptr;
}

} // namespace

INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(AllReduce);
INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(AllReduce, plan, run, cleanup);

AllReduce::AllReduce(Tensor x, infinicclComm_t communicator) {
    INFINICORE_GRAPH_OP_DISPATCH(x->device().getType(), x, communicator);
}

void AllReduce::execute(Tensor x, infinicclComm_t communicator) {
    INFINICORE_GRAPH_OP_RECORD_OR_RUN(AllReduce, x, communicator);
}

void all_reduce_(Tensor x, infinicclComm_t communicator) {
    AllReduce::execute(x, communicator);
}

} // namespace infinicore::nn
