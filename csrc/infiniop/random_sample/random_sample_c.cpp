// infiniopRandomSample, and placeholders of infiniopRandomSampleBatch that return NOT_IMPLEMENTED.
#include "c_api.h"
#include "random_sample.h"

namespace {

using namespace infini;
using random_sample::GivenArgs;

constexpr c_api::COp<GivenArgs> kOp("RandomSample", random_sample::given_kernels, random_sample::check,
                                    random_sample::run);

infiniStatus_t not_there(const char *function) {
    return guarded([&] {
        throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                    message(function, ": not implemented; call infiniopRandomSample for each row"));
    });
}

} // namespace

infiniStatus_t infiniopCreateRandomSampleDescriptor(infiniopHandle_t handle, infiniopRandomSampleDescriptor_t *desc_ptr,
                                                    infiniopTensorDescriptor_t result_desc,
                                                    infiniopTensorDescriptor_t probs_desc) {
    return kOp.create(handle, desc_ptr, [&](GivenArgs &args, const c_api::Tensors &tensor) {
        args.result = tensor("result_desc", result_desc);
        args.probs = tensor("probs_desc", probs_desc);
        args.names = &random_sample::kRandomSampleOfC;
    });
}

INFINIOP_WORKSPACE_SIZE(RandomSample, kOp)

infiniStatus_t infiniopRandomSample(infiniopRandomSampleDescriptor_t desc, void *workspace, size_t workspace_size,
                                    void *result, const void *probs, float random_val, float topp, int topk,
                                    float temperature, void *stream) {
    return kOp.launch(desc, workspace, workspace_size, stream, [&](GivenArgs &args, const c_api::Memory &memory) {
        memory(args.result, "result", result);
        memory(args.probs, "probs", probs);
        args.random_val = random_val;
        args.topp = topp;
        args.topk = topk;
        args.temperature = temperature;
    });
}

INFINIOP_DESTROY(RandomSample, kOp)

// The interface declares these two; its reference implementation lacks them, but callers look the names up.
infiniStatus_t infiniopCreateRandomSampleBatchDescriptor(infiniopHandle_t, infiniopRandomSampleDescriptor_t *,
                                                         infiniopTensorDescriptor_t, infiniopTensorDescriptor_t) {
    return not_there("infiniopCreateRandomSampleBatchDescriptor");
}

infiniStatus_t infiniopRandomSampleBatch(infiniopRandomSampleDescriptor_t, void *, size_t, void *, const void *,
                                         const float *, const float *, const int *, const float *, int, void *) {
    return not_there("infiniopRandomSampleBatch");
}
