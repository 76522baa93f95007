// The checks of every op before it computes, and how a call is added to a recording.
#include "call.h"

namespace infinicore::op {

const Tensor &present(const char *op, const char *name, const Tensor &tensor) {
    if (!tensor) {
        fail("infinicore::", op, ": ", name, " must be a tensor, got an empty one");
    }
    return tensor;
}

namespace {

void check_recorded_device(const char *op, const char *name, const Device &device, const Recording *recording) {
    if (recording == nullptr || recording->device == device) {
        return;
    }
    // torch_infini.runtime.record keeps a CPU graph open while torch captures on CUDA.
    const char *const why = recording->device == Device::cpu() && device.getType() == Device::Type::NVIDIA
                                ? " (torch_infini.runtime.record on CUDA records torch's ops alone)"
                                : "";
    fail("infinicore::", op, ": ", name, " must be on ", recording->device.toString(),
         ", whose graph is recorded, got ", device.toString(), why);
}

} // namespace

Tensor new_result(const char *op, const char *name, const Tensor &argument, const Shape &shape, DataType dtype) {
    const Device device = present(op, name, argument)->device();
    check_recorded_device(op, name, device, current_recording()); // a device that is captured may refuse to allocate
    return Tensor::empty(shape, dtype, device);
}

Tensor result_like(const char *op, const char *name, const Tensor &argument) {
    const Tensor &like = present(op, name, argument);
    return new_result(op, name, like, like->shape(), like->dtype());
}

Device enter(const char *op, const Argument *arguments, size_t count) {
    const Tensor *first = nullptr;
    const char *first_name = "";
    Recording *const recording = current_recording();
    for (size_t i = 0; i < count; ++i) {
        const Argument &argument = arguments[i];
        if (!argument.tensor && argument.is_optional) {
            continue;
        }
        present(op, argument.name, argument.tensor);
        if (first == nullptr) {
            first = &argument.tensor;
            first_name = argument.name;
        } else if (argument.tensor->device() != (*first)->device()) {
            fail("infinicore::", op, ": ", argument.name, " must be on ", (*first)->device().toString(), " as ",
                 first_name, " is, got ", argument.tensor->device().toString());
        }
        if (argument.access != Argument::Write && argument.tensor->memory()->is_recorded_only() &&
            (recording == nullptr || !argument.tensor->memory()->is_of(recording->pool->ran))) {
            fail("infinicore::", op, ": ", argument.name,
                 " must have values, got a tensor that is only recorded: call Graph::run() first");
        }
    }
    const Device device = (*first)->device();
    context::setDevice(device);
    check_recorded_device(op, first_name, device, recording);
    return device;
}

void note(Recording &recording, std::shared_ptr<RecordedCall> call, const Argument *arguments, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const Tensor &tensor = arguments[i].tensor;
        if (!tensor) {
            call->set_address(i, nullptr);
            continue;
        }
        Recorder::keep(recording, tensor);
        call->set_address(i, const_cast<std::byte *>(tensor->data()));
        call->tensors.push_back({arguments[i].name, tensor->to_blob(), arguments[i].access,
                                 tensor->memory()->is_pooled_by(recording.pool->ran), tensor->memory()});
    }
    Recorder::add(std::move(call));
}

} // namespace infinicore::op
