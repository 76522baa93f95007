// torch.ops.infini.all_reduce and the other collectives: their rules, and the calls of libinfiniccl. Declared in
// torch_infini/ops/collectives.py. Tensors that are not contiguous are copied, because libinfiniccl needs contiguous
// elements.
#include <optional>
#include <utility>

#include "collectives.h"
#include "rearrange/rearrange.h"

namespace infini::collectives {
namespace {

bool is_contiguous(const TensorView &view) {
    int64_t step = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
        if (view.shape[i] != 1 && view.strides[i] != step) {
            return view.numel() == 0;
        }
        step *= view.shape[i];
    }
    return true;
}

// torch's stream on the GPU, registered with infinirt for the length of one call; NULL on the CPU.
class Stream {
public:
    explicit Stream(const ExecutionContext &context) {
        if (!context.is_cpu()) {
            check_status(infinirtGetDevice(&type_, &id_));
            check_status(infinirtSetDevice(context.device_type, context.device_id));
            void *const legacy = reinterpret_cast<void *>(1); // cudaStreamLegacy, torch's default stream
            check_status(infinirtStreamFromNative(&stream_, context.stream != nullptr ? context.stream : legacy));
        }
    }
    ~Stream() {
        if (stream_ != nullptr) {
            infinirtStreamDestroy(stream_);
            infinirtSetDevice(type_, id_);
        }
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;
    infinirtStream_t get() const { return stream_; }

    static void check_status(infiniStatus_t status) {
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status, infiniGetLastErrorMessage());
        }
    }

private:
    infiniDevice_t type_ = INFINI_DEVICE_CPU;
    int id_ = 0;
    infinirtStream_t stream_ = nullptr;
};

void communicate(const ExecutionContext &context, const Group &group, const Call &call, const TensorView &x,
                 const TensorView &out) {
    const auto count = static_cast<size_t>(call.count);
    if (group.function != nullptr) {
        return Stream::check_status(group.function(call.kind, x.data, out.data, call.count, x.dtype, call.parameter));
    }
    const Stream stream(context);
    const auto op = static_cast<infinicclReduceOp_t>(call.parameter);
    switch (call.kind) {
    case Collective::all_reduce:
        return Stream::check_status(infinicclAllReduce(x.data, out.data, count, x.dtype, op, group.comm, stream.get()));
    case Collective::broadcast:
        return Stream::check_status(
            infinicclBroadcast(x.data, out.data, count, x.dtype, call.parameter, group.comm, stream.get()));
    case Collective::all_gather:
        return Stream::check_status(infinicclAllGather(x.data, out.data, count, x.dtype, group.comm, stream.get()));
    case Collective::reduce_scatter:
        return Stream::check_status(
            infinicclReduceScatter(x.data, out.data, count, x.dtype, op, group.comm, stream.get()));
    }
}

void copy(const ExecutionContext &context, const TensorView &to, const TensorView &from) {
    rearrange::run(context, {to, from}, {{"out", "x"}, 1});
}

} // namespace

std::shared_ptr<const Group> group_of(const Checker &rule, int64_t number) {
    std::shared_ptr<const Group> group = find_group(number);
    if (group == nullptr) {
        rule.fail(
            INFINI_STATUS_BAD_PARAM, "group",
            "be 0 (this process by itself) or what torch_infini.distributed.communicator gave for a process group "
            "that is still there",
            message(number));
    }
    return group;
}

void run(const ExecutionContext &context, const Group &group, const Call &call, const TensorView &x,
         const TensorView &out) {
    if (group.size == 1) { // every collective of one rank is a copy
        return copy(context, out, x);
    }
    const Checker rule("collectives"); // for tensors made here, which violate no rule
    std::optional<Tensor> dense_x, dense_out;
    TensorView from = x, to = out;
    if (!is_contiguous(x)) {
        from = view(context, rule, "x", dense_x.emplace(empty_like(context, x)));
        copy(context, from, x);
    }
    if (!is_contiguous(out)) {
        to = view(context, rule, "out", dense_out.emplace(empty_like(context, out)));
    }
    communicate(context, group, call, from, to);
    if (dense_out) {
        copy(context, out, to);
    }
}

namespace {

// ---- rules ----

constexpr Checker kAllReduce("all_reduce"), kBroadcast("broadcast"), kAllGather("all_gather"),
    kReduceScatter("reduce_scatter");

int32_t reduction(const Checker &rule, int64_t op, const TensorView &x) {
    if (op < 0 || op > INFINICCL_AVG) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "op", "be 0 (sum), 1 (product), 2 (max), 3 (min) or 4 (mean)", message(op));
    }
    if (op == INFINICCL_AVG) {
        rule.dtype("x of a mean", x, INFINI_FLOATS_AND_DOUBLE);
    }
    return static_cast<int32_t>(op);
}

void check_size(const Checker &rule, const Group &group, int64_t group_size) {
    if (group_size != group.size) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "group_size", message("be the number of the group's ranks, ", group.size),
                  message(group_size));
    }
}

// The shape of x with the first dimension multiplied by `factor`.
TensorView gathered(const Checker &rule, const TensorView &x, int64_t factor) {
    rule.rank("x", x, 1, kMaxDims);
    TensorView result = x;
    result.shape[0] *= factor;
    return result;
}

// The shape of x with the first dimension divided by `divisor`.
TensorView scattered(const Checker &rule, const TensorView &x, int64_t divisor) {
    rule.rank("x", x, 1, kMaxDims);
    if (x.shape[0] % divisor != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "x",
                  message("have a first dimension that is a multiple of the group's ranks, ", divisor),
                  message("shape ", shape_of(x)));
    }
    TensorView result = x;
    result.shape[0] /= divisor;
    return result;
}

// The view of `out`, which must have the shape of `result`.
TensorView out_view(const ExecutionContext &context, const Checker &rule, const Tensor &out, const TensorView &result,
                    const TensorView &x) {
    const TensorView written = view(context, rule, "out", out);
    rule.same_dtype("out", written, "x", x);
    rule.same_shape("out", written, "the result", result);
    rule.writable("out", written);
    return written;
}

// ---- ops ----

// What both forms of an op share once its arguments are checked: the result's shape and the call.
struct Plan {
    std::shared_ptr<const Group> group;
    TensorView x, result;
    Call call;
};

Plan plan_all_reduce(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t op) {
    const TensorView from = view_of_numbers(context, kAllReduce, "x", x);
    return {group_of(kAllReduce, group),
            from,
            from,
            {Collective::all_reduce, from.numel(), reduction(kAllReduce, op, from)}};
}

Plan plan_broadcast(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t root) {
    const TensorView from = view_of_numbers(context, kBroadcast, "x", x);
    const auto ranks = group_of(kBroadcast, group);
    if (root < 0 || root >= ranks->size) {
        kBroadcast.fail(INFINI_STATUS_BAD_PARAM, "root", message("be a rank of the group, 0 to ", ranks->size - 1),
                        message(root));
    }
    return {ranks, from, from, {Collective::broadcast, from.numel(), static_cast<int32_t>(root)}};
}

Plan plan_all_gather(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size) {
    const TensorView from = view_of_numbers(context, kAllGather, "x", x);
    const auto ranks = group_of(kAllGather, group);
    check_size(kAllGather, *ranks, group_size);
    return {ranks, from, gathered(kAllGather, from, group_size), {Collective::all_gather, from.numel(), 0}};
}

Plan plan_reduce_scatter(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size,
                         int64_t op) {
    const TensorView from = view_of_numbers(context, kReduceScatter, "x", x);
    const auto ranks = group_of(kReduceScatter, group);
    check_size(kReduceScatter, *ranks, group_size);
    const TensorView result = scattered(kReduceScatter, from, group_size);
    return {ranks, from, result, {Collective::reduce_scatter, result.numel(), reduction(kReduceScatter, op, from)}};
}

// x and out may alias if their shapes are equal.
void run(const ExecutionContext &context, const Checker &rule, const Plan &plan, const TensorView &out) {
    if (plan.call.kind == Collective::all_reduce || plan.call.kind == Collective::broadcast) {
        rule.no_partial_overlap("out", out, "x", plan.x);
    } else {
        rule.no_overlap("out", out, "x", plan.x);
    }
    run(context, *plan.group, plan.call, plan.x, out);
}

Tensor functional(const ExecutionContext &context, const Checker &rule, const Plan &plan) {
    Tensor out = empty_like(context, plan.result);
    run(context, *plan.group, plan.call, plan.x, view(context, rule, "out", out));
    return out;
}

Tensor into(const ExecutionContext &context, const Checker &rule, const Plan &plan, Tensor out) {
    run(context, rule, plan, out_view(context, rule, out, plan.result, plan.x));
    return out;
}

Tensor all_reduce(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t op) {
    return functional(context, kAllReduce, plan_all_reduce(context, x, group, op));
}
Tensor all_reduce_out(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t op, Tensor out) {
    return into(context, kAllReduce, plan_all_reduce(context, x, group, op), std::move(out));
}
void all_reduce_(const ExecutionContext &context, Tensor x, int64_t group, int64_t op) {
    all_reduce_out(context, x, group, op, x);
}

Tensor broadcast(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t root) {
    return functional(context, kBroadcast, plan_broadcast(context, x, group, root));
}
Tensor broadcast_out(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t root, Tensor out) {
    return into(context, kBroadcast, plan_broadcast(context, x, group, root), std::move(out));
}
void broadcast_(const ExecutionContext &context, Tensor x, int64_t group, int64_t root) {
    broadcast_out(context, x, group, root, x);
}

Tensor all_gather(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size) {
    return functional(context, kAllGather, plan_all_gather(context, x, group, group_size));
}
Tensor all_gather_out(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size, Tensor out) {
    return into(context, kAllGather, plan_all_gather(context, x, group, group_size), std::move(out));
}

Tensor reduce_scatter(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size, int64_t op) {
    return functional(context, kReduceScatter, plan_reduce_scatter(context, x, group, group_size, op));
}
Tensor reduce_scatter_out(const ExecutionContext &context, const Tensor &x, int64_t group, int64_t group_size,
                          int64_t op, Tensor out) {
    return into(context, kReduceScatter, plan_reduce_scatter(context, x, group, group_size, op), std::move(out));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("all_reduce", INFINI_BOX(all_reduce));
    m.impl("all_reduce.out", INFINI_BOX(all_reduce_out));
    m.impl("all_reduce_", INFINI_BOX(all_reduce_));
    m.impl("broadcast", INFINI_BOX(broadcast));
    m.impl("broadcast.out", INFINI_BOX(broadcast_out));
    m.impl("broadcast_", INFINI_BOX(broadcast_));
    m.impl("all_gather", INFINI_BOX(all_gather));
    m.impl("all_gather.out", INFINI_BOX(all_gather_out));
    m.impl("reduce_scatter", INFINI_BOX(reduce_scatter));
    m.impl("reduce_scatter.out", INFINI_BOX(reduce_scatter_out));
}

} // namespace infini::collectives
