// Fusion of recorded calls: two adjacent calls become one that computes the same bits in one pass. A rule is a function
// of two calls that returns the fused call, or nullptr.
#include <algorithm>
#include <cstdint>

#include "infinicore/ops/add_rms_norm.hpp"
#include "infinicore/ops/swiglu.hpp"
#include "ops/call.h"
#include "ops/linear_add.h"
#include "recording.h"

namespace infinicore::graph {

namespace {

using op::Argument;
using op::RecordedCall;
using Tensors = RecordedCall::Tensors;
using Operators = std::vector<std::shared_ptr<GraphOperator>>;

// The byte range that a tensor's elements span.
struct Range {
    explicit Range(const Tensor &tensor) : begin(reinterpret_cast<uintptr_t>(tensor->data())), end(begin) {
        if (tensor->numel() > 0) {
            const auto size = static_cast<Stride>(tensor->element_size());
            end += tensor->element_size();
            for (size_t dim = 0; dim < tensor->ndim(); ++dim) {
                const Stride reach = static_cast<Stride>(tensor->size(dim) - 1) * tensor->stride(dim) * size;
                (reach < 0 ? begin : end) += static_cast<uintptr_t>(reach);
            }
        }
    }
    bool overlaps(const Range &other) const { return begin < other.end && other.begin < end; }
    bool covers(const Range &other) const { return begin <= other.begin && other.end <= end; }
    uintptr_t begin, end;
};

bool is_same(const Tensor &a, const Tensor &b) {
    return a->data() == b->data() && a->dtype() == b->dtype() && a->shape() == b->shape() &&
           a->strides() == b->strides();
}

// Whether the output is where an op that computes in one pass allows it: at the input's elements, or apart from them.
bool is_in_place_or_apart(const Tensor &out, const Tensor &in) {
    return is_same(out, in) || !Range(out).overlaps(Range(in));
}

// Whether no later call reads what the call at `index` has written to `written`: the tensor is the graph's own, no
// handle to it is left, and later calls write it before they read it.
bool is_dead(const Tensors &written, const Operators &ops, size_t index) {
    if (!written.is_of_pool || !written.memory.expired()) {
        return false;
    }
    const Range range(written.blob);
    for (size_t i = index + 1; i < ops.size(); ++i) {
        const auto *const call = dynamic_cast<const RecordedCall *>(ops[i].get());
        if (call == nullptr) {
            return false; // its reads are not known
        }
        bool is_covered = false;
        for (const Tensors &tensor : call->tensors) {
            if (tensor.access != Argument::Write && Range(tensor.blob).overlaps(range)) {
                return false;
            }
            is_covered |=
                tensor.access == Argument::Write && tensor.blob->is_contiguous() && Range(tensor.blob).covers(range);
        }
        if (is_covered) {
            return true;
        }
    }
    return true; // nor does the next run, which writes it first, as this one did
}

// add(c, a, b), rms_norm(y, c, weight, epsilon) -> add_rms_norm(y, c, a, b, weight, epsilon).
std::shared_ptr<GraphOperator> add_rms_norm(const Recording &recording, const RecordedCall &add,
                                            const RecordedCall &norm) {
    const Tensor &c = add.tensors[0].blob, &a = add.tensors[1].blob, &b = add.tensors[2].blob;
    const Tensor &y = norm.tensors[0].blob, &x = norm.tensors[1].blob, &weight = norm.tensors[2].blob;
    if (!is_same(x, c) || Range(y).overlaps(Range(c)) || Range(y).overlaps(Range(weight)) ||
        Range(c).overlaps(Range(weight)) || !is_in_place_or_apart(y, a) || !is_in_place_or_apart(y, b)) {
        return nullptr;
    }
    return Recorder::note_apart(recording,
                                [&] { op::add_rms_norm_(y, c, a, b, weight, static_cast<float>(norm.numbers[0])); });
}

// silu(s, gate), mul(c, s, up) -> swiglu(c, up, gate), if s is not read later. Not for half types, which round s.
std::shared_ptr<GraphOperator> swiglu(const Recording &recording, const RecordedCall &silu, const RecordedCall &mul) {
    const Tensor &s = silu.tensors[0].blob, &gate = silu.tensors[1].blob;
    const Tensor &c = mul.tensors[0].blob;
    const bool first = is_same(mul.tensors[1].blob, s), second = is_same(mul.tensors[2].blob, s);
    if (first == second || (s->dtype() != DataType::F32 && s->dtype() != DataType::F64)) {
        return nullptr;
    }
    const Tensor &up = mul.tensors[first ? 2 : 1].blob;
    if (Range(up).overlaps(Range(s)) || !is_in_place_or_apart(c, up) || !is_in_place_or_apart(c, gate)) {
        return nullptr;
    }
    return Recorder::note_apart(recording, [&] { op::swiglu_(c, up, gate); });
}

// linear(s, input, weight, bias), add(c, s, residual) -> linear_add(c, input, weight, bias, residual), if s is not read
// later. Both round the product to s's dtype.
std::shared_ptr<GraphOperator> linear_add(const Recording &recording, const RecordedCall &linear,
                                          const RecordedCall &add) {
    const Tensor &s = linear.tensors[0].blob, &c = add.tensors[0].blob;
    const bool first = is_same(add.tensors[1].blob, s), second = is_same(add.tensors[2].blob, s);
    if (first == second) {
        return nullptr;
    }
    const Tensor &residual = add.tensors[first ? 2 : 1].blob;
    if (Range(residual).overlaps(Range(s)) || !is_in_place_or_apart(c, residual)) {
        return nullptr;
    }
    for (size_t i = 1; i < linear.tensors.size(); ++i) { // input, weight, and the optional bias
        if (Range(c).overlaps(Range(linear.tensors[i].blob))) {
            return nullptr;
        }
    }
    const Tensor bias = linear.tensors.size() > 3 ? linear.tensors[3].blob : Tensor();
    return Recorder::note_apart(
        recording, [&] { op::linear_add_(c, linear.tensors[1].blob, linear.tensors[2].blob, bias, residual); });
}

// A rule for two adjacent calls, by their names.
struct Rule {
    const char *first, *second, *fused;
    bool keeps_first; // the fused op also writes the first call's output
    std::shared_ptr<GraphOperator> (*fuse)(const Recording &, const RecordedCall &first, const RecordedCall &second);
};

// Applied in this order, each over the whole graph: of linear + add + rms_norm, the last two are fused.
constexpr Rule kRules[] = {
    {"add", "rms_norm", "add_rms_norm", true, add_rms_norm},
    {"silu", "mul", "swiglu", false, swiglu},
    {"linear", "add", "linear_add", false, linear_add},
};

const RecordedCall *call_of(const GraphOperator &op, const char *name) {
    const auto *const call = dynamic_cast<const RecordedCall *>(&op);
    return call != nullptr && std::strcmp(call->op, name) == 0 ? call : nullptr;
}

} // namespace

std::vector<std::string> fuse(Operators &ops, const Recording &recording) {
    std::vector<std::string> report;
    for (const Rule &rule : kRules) {
        for (size_t i = 0; i + 1 < ops.size(); ++i) {
            const RecordedCall *const first = call_of(*ops[i], rule.first);
            const RecordedCall *const second = call_of(*ops[i + 1], rule.second);
            if (first == nullptr || second == nullptr) {
                continue;
            }
            const bool is_gone = is_same(second->tensors[0].blob, first->tensors[0].blob) || // overwritten
                                 is_dead(first->tensors[0], ops, i + 1);
            if (!rule.keeps_first && !is_gone) {
                continue;
            }
            if (std::shared_ptr<GraphOperator> fused = rule.fuse(recording, *first, *second)) {
                ops[i] = std::move(fused);
                ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i) + 1);
                report.push_back(message(rule.first, " + ", rule.second, " -> ", rule.fused));
            }
        }
    }
    return report;
}

} // namespace infinicore::graph
