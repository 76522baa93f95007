// nn::Parameter: selects this rank's part of a checkpoint's tensor, and checks that it fits.
#include "infinicore/nn/parameter.hpp"

#include "../error.h"
#include "infinicore/context/context.hpp"

namespace infinicore::nn {

namespace {

void check_shard(const Shape &shape, Size tp_dim, Size tp_rank, Size tp_size) {
    if (tp_rank >= tp_size) {
        fail("infinicore::nn::Parameter: tp_rank must be below tp_size, got ", tp_rank, " of ", tp_size);
    }
    if (tp_size > 1 && tp_dim >= shape.size()) {
        fail("infinicore::nn::Parameter: tp_dim must be one of the ", shape.size(), " dimensions of shape ",
             text(shape), ", got ", tp_dim);
    }
}

Shape shard_of(const Shape &shape, Size tp_dim, Size tp_rank, Size tp_size) {
    check_shard(shape, tp_dim, tp_rank, tp_size);
    Shape shard = shape;
    if (tp_size > 1) {
        if (shape[tp_dim] % tp_size != 0) {
            fail("infinicore::nn::Parameter: tp_size must divide dimension ", tp_dim, " of shape ", text(shape),
                 ", got ", tp_size);
        }
        shard[tp_dim] /= tp_size;
    }
    return shard;
}

} // namespace

Parameter::Parameter(const Tensor &tensor, Size tp_dim, Size tp_rank, Size tp_size)
    : Tensor(tensor), tp_dim_(tp_dim), tp_rank_(tp_rank), tp_size_(tp_size) {
    check_shard(tensor ? tensor->shape() : Shape(), tp_dim, tp_rank, tp_size);
}

Parameter::Parameter(const Shape &shape, const DataType &dtype, const Device &device, Size tp_dim, Size tp_rank,
                     Size tp_size)
    : Tensor(Tensor::empty(shard_of(shape, tp_dim, tp_rank, tp_size), dtype, device)), tp_dim_(tp_dim),
      tp_rank_(tp_rank), tp_size_(tp_size) {}

Shape Parameter::whole_shape() const {
    Shape whole = impl_->shape();
    if (tp_size_ > 1) {
        whole[tp_dim_] *= tp_size_;
    }
    return whole;
}

void Parameter::load_blob(const void *data) {
    load_blob("infinicore::nn::Parameter::load_blob: the parameter", data);
}

void Parameter::load(const Tensor &tensor) {
    load("infinicore::nn::Parameter::load: the parameter", tensor, false);
}

void Parameter::load_blob(const std::string &who, const void *data) {
    if (impl_ == nullptr) {
        fail(who, " must have a tensor to load into, and is empty");
    }
    if (data == nullptr && impl_->numel() > 0) {
        fail(who, " must be loaded from an address, got NULL");
    }
    load(who, Tensor::from_blob(const_cast<void *>(data), whole_shape(), impl_->dtype(), Device::cpu()), false);
}

void Parameter::load(const std::string &who, const Tensor &tensor, bool accepts_shard) {
    if (impl_ == nullptr) {
        fail(who, " must have a tensor to load into, and is empty");
    }
    if (!tensor) {
        fail(who, " must be loaded from a tensor, got an empty one");
    }
    if (context::isGraphRecording()) { // the copy would be recorded, and done only when the graph runs
        fail(who, " must not be loaded while a graph is recorded");
    }
    if (tensor->dtype() != impl_->dtype()) {
        fail(who, " must be loaded from ", toString(impl_->dtype()), ", got ", toString(tensor->dtype()));
    }
    Tensor part = tensor;
    if (tensor->shape() == whole_shape()) {
        if (tp_size_ > 1) {
            const Size length = impl_->size(tp_dim_);
            part = tensor->narrow({{tp_dim_, tp_rank_ * length, length}});
        }
    } else if (!accepts_shard || tensor->shape() != impl_->shape()) {
        const std::string shards =
            tp_size_ > 1 ? message(", which is split over ", tp_size_, " ranks in dimension ", tp_dim_) : std::string();
        fail(who, " must be loaded from shape ", text(whole_shape()), shards, ", got ", text(tensor->shape()));
    }
    impl_->copy_from(part);
    // The caller may free or change its memory now. Copies from the host to other devices are already done.
    if (tensor->device() == impl_->device() && tensor->device().getType() == Device::Type::CPU) {
        context::syncStream();
    }
}

} // namespace infinicore::nn
