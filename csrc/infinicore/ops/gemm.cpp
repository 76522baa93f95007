// gemm and matmul, by libinfiniop's Gemm. Registered as graph ops: planned once, run many times.
#include "infinicore/ops/gemm.hpp"

#include <algorithm>

#include "call.h"
#include "infinicore/ops/matmul.hpp"
#include "zeros.h"

namespace infinicore::op {

namespace {

using Operator =
    COperator<infiniopCreateGemmDescriptor, infiniopGetGemmWorkspaceSize, infiniopGemm, infiniopDestroyGemmDescriptor>;

struct Plan {
    graph::GraphTensor c, a, b;
    float alpha, beta;
};

Shape leading(const Tensor &tensor) {
    return Shape(tensor->shape().begin(), tensor->shape().end() - 2);
}

bool is_one(const Shape &shape) {
    return std::all_of(shape.begin(), shape.end(), [](Size size) { return size == 1; });
}

// Views [..., m, n] as [batch, m, n], over the same memory.
Tensor as_batch(const char *name, const Tensor &tensor, const Tensor &c) {
    const size_t dims = tensor->ndim() - std::min<size_t>(tensor->ndim(), 2);
    if (tensor->ndim() != c->ndim() || (leading(tensor) != leading(c) && !is_one(leading(tensor)))) {
        fail("infinicore::gemm: ", name, " must have the leading dimensions of c, ", text(leading(c)),
             ", or as many of size 1, got shape ", text(tensor->shape()));
    }
    Size batch = 1;
    Stride stride = 0;
    for (size_t dim = dims; dim-- > 0;) {
        const Size size = tensor->size(dim);
        if (size != 1 && batch != 1 && tensor->stride(dim) != stride * static_cast<Stride>(batch) &&
            tensor->numel() > 0) {
            fail("infinicore::gemm: ", name, " must have leading dimensions that lie as one (call contiguous()), got ",
                 tensor->info());
        }
        stride = batch == 1 && size != 1 ? tensor->stride(dim) : stride;
        batch *= size;
    }
    return tensor->as_strided({batch, tensor->size(dims), tensor->size(dims + 1)},
                              {stride, tensor->stride(dims), tensor->stride(dims + 1)});
}

void compute(const Tensor &c, const Tensor &a, const Tensor &b, float alpha, float beta) {
    if (present("gemm", "c", c)->ndim() > 3) {
        const Tensor &left = present("gemm", "a", a), &right = present("gemm", "b", b);
        return compute(as_batch("c", c, c), as_batch("a", left, c), as_batch("b", right, c), alpha, beta);
    }
    Operator::call("gemm", {{"c", c, beta == 0 ? Argument::Write : Argument::ReadWrite}, {"a", a}, {"b", b}},
                   std::tuple{}, std::tuple{alpha, beta});
}

void *plan(Tensor c, Tensor a, Tensor b, float alpha, float beta) {
    return new Plan{c, a, b, alpha, beta};
}

void run_plan(void *planned_meta) {
    const Plan &plan = *static_cast<const Plan *>(planned_meta);
    compute(plan.c, plan.a, plan.b, plan.alpha, plan.beta);
}

void cleanup(void **planned_meta) {
    delete static_cast<Plan *>(*planned_meta);
    *planned_meta = nullptr;
}

// Allocates the result [..., m, n] of [..., m, k] and [..., k, n].
Tensor product(const char *op, const Tensor &a, const Tensor &b) {
    if (present(op, "a", a)->ndim() < 2 || present(op, "b", b)->ndim() < 2) {
        fail("infinicore::", op, ": a and b must have at least 2 dimensions, got ", a->info(), " and ", b->info());
    }
    Shape shape = a->ndim() == b->ndim() && is_one(leading(a)) ? leading(b) : leading(a);
    shape.push_back(a->size(a->ndim() - 2));
    shape.push_back(b->size(b->ndim() - 1));
    return new_result(op, "a", a, shape, a->dtype());
}

} // namespace

INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(Gemm);
INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(Gemm, plan, run_plan, cleanup);

Gemm::Gemm(Tensor c, Tensor a, Tensor b, float alpha, float beta) {
    INFINICORE_GRAPH_OP_DISPATCH(c->device().getType(), c, a, b, alpha, beta);
}

void Gemm::execute(Tensor c, Tensor a, Tensor b, float alpha, float beta) {
    // Our function needs no such plan: its operators are prepared once per shape anyway.
    if (!c || run_dispatcher().lookup(c->device().getType()) == &run_plan) {
        compute(c, a, b, alpha, beta);
    } else {
        context::setDevice(c->device());
        INFINICORE_GRAPH_OP_RECORD_OR_RUN(Gemm, c, a, b, alpha, beta);
    }
}

void gemm_(Tensor c, Tensor a, Tensor b, float alpha, float beta) {
    Gemm::execute(std::move(c), std::move(a), std::move(b), alpha, beta);
}

Tensor gemm(Tensor a, Tensor b, float alpha, float beta) {
    Tensor c = product("gemm", a, b);
    if (beta != 0) {
        zeros_(c);
    }
    gemm_(c, std::move(a), std::move(b), alpha, beta);
    return c;
}

void matmul_(Tensor c, Tensor a, Tensor b, float alpha) {
    gemm_(std::move(c), std::move(a), std::move(b), alpha, 0.0f);
}

Tensor matmul(Tensor a, Tensor b, float alpha) {
    Tensor c = product("matmul", a, b);
    matmul_(c, std::move(a), std::move(b), alpha);
    return c;
}

} // namespace infinicore::op
