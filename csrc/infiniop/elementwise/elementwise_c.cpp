// The C ABI of the elementwise ops: four functions for each line of its table.
#include "c_api.h"
#include "elementwise.h"

#include <string>

namespace {

using namespace infini;
using elementwise::Args;
using elementwise::Op;

constexpr c_api::COp<Args> c_op(const char *name) {
    return c_api::COp<Args>(
        name, elementwise::kernels, [](const Args &args) { elementwise::check(args, describe(args.op).names); },
        [](const ExecutionContext &context, const Args &args) {
            elementwise::run(context, args, describe(args.op).names);
        });
}

// One COp for each op: its address identifies the op of a descriptor.
#define INFINI_OP(Name, ...) constexpr c_api::COp<Args> k##Name = c_op(#Name);
INFINI_ELEMENTWISE_C_OPS(INFINI_OP)
#undef INFINI_OP

template <typename... Descs>
infiniStatus_t create(const c_api::COp<Args> &c_op, Op op, infiniopHandle_t handle, InfiniopDescriptor **desc_ptr,
                      Descs... descs) {
    return c_op.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.op = op;
        int t = 0;
        for (const infiniopTensorDescriptor_t desc : {descs...}) {
            args.tensors[t] = tensor((describe(op).names.tensors[t] + std::string("_desc")).c_str(), desc);
            ++t;
        }
    });
}

template <typename... Inputs>
infiniStatus_t launch(const c_api::COp<Args> &c_op, Op op, InfiniopDescriptor *desc, void *workspace,
                      size_t workspace_size, void *stream, void *output, Inputs... inputs) {
    return c_op.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        const auto &names = describe(op).names.tensors;
        memory(args.tensors[0], names[0], output);
        int t = 1;
        for (const void *const input : {inputs...}) {
            if (!is_fill(op)) {
                memory(args.tensors[t], names[t], input);
            }
            ++t;
        }
    });
}

// Parameters and arguments for 1, 2 and 3 inputs.
#define DESC_PARAMETERS_1 infiniopTensorDescriptor_t t0, infiniopTensorDescriptor_t t1
#define DESC_PARAMETERS_2 DESC_PARAMETERS_1, infiniopTensorDescriptor_t t2
#define DESC_PARAMETERS_3 DESC_PARAMETERS_2, infiniopTensorDescriptor_t t3
#define MEMORY_PARAMETERS_1 void *t0, const void *t1
#define MEMORY_PARAMETERS_2 MEMORY_PARAMETERS_1, const void *t2
#define MEMORY_PARAMETERS_3 MEMORY_PARAMETERS_2, const void *t3
#define ARGUMENTS_1 t0, t1
#define ARGUMENTS_2 ARGUMENTS_1, t2
#define ARGUMENTS_3 ARGUMENTS_2, t3

} // namespace

#define INFINI_OP(Name, name, inputs, ...)                                                                             \
    infiniStatus_t infiniopCreate##Name##Descriptor(infiniopHandle_t handle, infiniop##Name##Descriptor_t *desc_ptr,   \
                                                    DESC_PARAMETERS_##inputs) {                                        \
        return create(k##Name, Op::name, handle, desc_ptr, ARGUMENTS_##inputs);                                        \
    }                                                                                                                  \
    INFINIOP_WORKSPACE_SIZE(Name, k##Name)                                                                             \
    infiniStatus_t infiniop##Name(infiniop##Name##Descriptor_t desc, void *workspace, size_t workspace_size,           \
                                  MEMORY_PARAMETERS_##inputs, void *stream) {                                          \
        return launch(k##Name, Op::name, desc, workspace, workspace_size, stream, ARGUMENTS_##inputs);                 \
    }                                                                                                                  \
    INFINIOP_DESTROY(Name, k##Name)

INFINI_ELEMENTWISE_C_OPS(INFINI_OP)
