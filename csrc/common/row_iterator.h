// RowIterator: iterates over the rows (all dimensions but the last) of several tensors of equal shape and any strides,
// for kernels that work along the last dimension. The step to the next row costs one addition per tensor; adjacent
// dimensions are merged first if every tensor allows it.
#pragma once

#include "level.h"
#include "tensor_view.h"

namespace infini::INFINI_LEVEL {
namespace {

template <int kTensors> class RowIterator {
public:
    // All views have the shape of views[0], or the caller has given them the missing dimensions with stride 0.
    explicit RowIterator(const TensorView *const (&views)[kTensors]) {
        const TensorView &first = *views[0];
        for (int dim = 0; dim + 1 < first.ndim; ++dim) {
            const int64_t size = first.shape[dim];
            count_ *= size;
            if (size == 1) {
                continue;
            }
            bool merges = ndim_ > 0;
            for (int t = 0; t < kTensors; ++t) {
                merges = merges && strides_[t][ndim_ - 1] == views[t]->strides[dim] * size;
            }
            if (!merges) {
                ++ndim_;
            }
            shape_[ndim_ - 1] = merges ? shape_[ndim_ - 1] * size : size;
            for (int t = 0; t < kTensors; ++t) {
                strides_[t][ndim_ - 1] = views[t]->strides[dim];
            }
        }
    }

    int64_t count() const { return count_; }

    // Calls body(offsets) for rows begin .. end-1; offsets[t] is where the row starts in tensor t, in elements.
    template <typename Body> void visit(int64_t begin, int64_t end, const Body &body) const {
        int64_t index[kMaxDims] = {}, offsets[kTensors] = {};
        int64_t rest = begin;
        for (int dim = ndim_ - 1; dim >= 0; --dim) {
            index[dim] = rest % shape_[dim];
            rest /= shape_[dim];
            for (int t = 0; t < kTensors; ++t) {
                offsets[t] += index[dim] * strides_[t][dim];
            }
        }
        for (int64_t row = begin; row < end; ++row) {
            body(offsets);
            for (int dim = ndim_ - 1; dim >= 0; --dim) {
                ++index[dim];
                for (int t = 0; t < kTensors; ++t) {
                    offsets[t] += strides_[t][dim];
                }
                if (index[dim] < shape_[dim]) {
                    break;
                }
                for (int t = 0; t < kTensors; ++t) {
                    offsets[t] -= index[dim] * strides_[t][dim];
                }
                index[dim] = 0;
            }
        }
    }

private:
    int ndim_ = 0;
    int64_t count_ = 1;
    int64_t shape_[kMaxDims] = {};
    int64_t strides_[kTensors][kMaxDims] = {};
};

} // namespace
} // namespace infini::INFINI_LEVEL
