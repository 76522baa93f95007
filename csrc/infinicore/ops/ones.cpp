// ones and zeros_, by libinfiniop's Ones and Zeros, which fill real numbers; complex tensors are filled as pairs of
// reals.
#include "infinicore/ops/ones.hpp"

#include "call.h"
#include "zeros.h"

namespace infinicore::op {

namespace {

using FillOnes =
    COperator<infiniopCreateOnesDescriptor, infiniopGetOnesWorkspaceSize, infiniopOnes, infiniopDestroyOnesDescriptor>;
using FillZeros = COperator<infiniopCreateZerosDescriptor, infiniopGetZerosWorkspaceSize, infiniopZeros,
                            infiniopDestroyZerosDescriptor>;

// The real (part 0) or imaginary (part 1) parts of a complex tensor.
Tensor parts(const Tensor &tensor, DataType dtype, size_t part) {
    Strides strides = tensor->strides();
    for (Stride &stride : strides) {
        stride *= 2;
    }
    const size_t offset = static_cast<size_t>(tensor->data() - tensor->memory()->data());
    return Tensor::from_memory(tensor->memory(), tensor->shape(), strides, dtype, offset + part * dsize(dtype));
}

// The dtype of a complex number's parts; the dtype itself of any other.
DataType part_of(DataType dtype) {
    switch (dtype) {
    case DataType::C16:
        return DataType::F8;
    case DataType::C32:
        return DataType::F16;
    case DataType::C64:
        return DataType::F32;
    case DataType::C128:
        return DataType::F64;
    default:
        return dtype;
    }
}

void compute(Tensor output) {
    const DataType part = part_of(present("ones", "output", output)->dtype());
    const Tensor real = part == output->dtype() ? output : parts(output, part, 0);
    FillOnes::call("ones", {{"output", real, Argument::Write}, {"output", real, Argument::Write}});
    if (part != output->dtype()) {
        zeros_(parts(output, part, 1));
    }
}

} // namespace

common::OpDispatcher<Ones::schema> &Ones::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("ones", compute);
    return *dispatcher;
}

void Ones::execute(Tensor output) {
    dispatch(dispatcher(), compute, "ones", output, std::move(output));
}

void ones_(Tensor output) {
    Ones::execute(std::move(output));
}

Tensor ones() {
    Tensor output = Tensor::empty({}, DataType::F32, context::getDevice());
    ones_(output);
    return output;
}

void zeros_(Tensor output) {
    const DataType part = part_of(output->dtype());
    for (size_t i = 0; i < (part == output->dtype() ? 1 : 2); ++i) {
        const Tensor half = part == output->dtype() ? output : parts(output, part, i);
        FillZeros::call("zeros", {{"output", half, Argument::Write}, {"output", half, Argument::Write}});
    }
}

} // namespace infinicore::op
