// torch.ops.infini.all_reduce_add_rms_norm: the sum over the ranks, the residual addition and the norm in one call.
// Declared in torch_infini/ops/all_reduce_add_rms_norm.py. Between ranks that share memory a row is normalised as soon as
// its sum is there, and so while it is in the caches.
#include <optional>
#include <tuple>
#include <utility>

#include "collectives.h"
#include "rearrange/rearrange.h"
#include "rms_norm/rms_norm.h"

namespace infini::collectives {
namespace {

constexpr const char *kOp = "all_reduce_add_rms_norm";
constexpr Checker kRule(kOp);

// Contiguous views of the same elements, by rows.
struct Rows {
    rms_norm::Args args;
    int64_t columns, done = 0;

    void until(int64_t row) {
        if (row > done) {
            rms_norm::Args piece = args;
            for (TensorView *view : {&piece.y, &piece.h, &piece.x, &piece.residual}) {
                *view = {static_cast<char *>(view->data) + done * columns * static_cast<int64_t>(size_of(view->dtype)),
                         view->dtype,
                         2,
                         {row - done, columns},
                         {columns, 1}};
            }
            rms_norm::compute(piece);
            done = row;
        }
    }

    static void then(void *rows, size_t elements) {
        auto *const all = static_cast<Rows *>(rows);
        all->until(static_cast<int64_t>(elements) / all->columns);
    }
};

std::tuple<Tensor, Tensor> all_reduce_add_rms_norm_out(const Tensor &x, const Tensor &residual, const Tensor &weight,
                                                       double eps, int64_t rounding, int64_t group, Tensor out0,
                                                       Tensor out1) {
    rms_norm::Args args;
    args.x = view(kRule, "x", x);
    args.residual = view(kRule, "residual", residual);
    args.weight = view(kRule, "weight", weight);
    args.eps = eps;
    args.rounding = static_cast<rms_norm::Rounding>(rounding);
    args.y = view(kRule, "out0", out0);
    args.h = view(kRule, "out1", out1);
    rms_norm::check(kOp, args);
    const std::shared_ptr<const Group> ranks = group_of(kRule, group);
    if (ranks->size == 1) {
        rms_norm::compute(args);
        return {out0, out1};
    }
    std::optional<Tensor> dense_x, dense_sum;
    TensorView from = args.x, sum = args.h;
    if (!is_contiguous(from)) {
        from = view(kRule, "x", dense_x.emplace(empty_like(from)));
        rearrange::run({from, args.x}, {{"out", "x"}, 1});
    }
    if (!is_contiguous(sum) || overlap(sum, args.residual)) { // which is still to be added
        sum = view(kRule, "sum", dense_sum.emplace(empty_like(sum)));
    }
    args.x = sum;
    const bool by_rows = ranks->comm != nullptr && !on_cuda() && sum.numel() > 0 && is_contiguous(args.residual) &&
                         is_contiguous(args.y) && is_contiguous(args.h);
    if (by_rows) {
        Rows rows{args, sum.size(-1)};
        must(infinicclAllReduceThen(from.data, sum.data, static_cast<size_t>(sum.numel()), sum.dtype, INFINICCL_SUM,
                                    ranks->comm, Rows::then, &rows));
    } else {
        communicate(*ranks, {Collective::all_reduce, sum.numel(), INFINICCL_SUM}, from, sum);
        rms_norm::compute(args);
    }
    return {out0, out1};
}

std::tuple<Tensor, Tensor> all_reduce_add_rms_norm(const Tensor &x, const Tensor &residual, const Tensor &weight,
                                                   double eps, int64_t rounding, int64_t group) {
    const TensorView from = view(kRule, "x", x), by = view(kRule, "weight", weight);
    const infiniDtype_t dtype = rms_norm::output_dtype(from.dtype, by.dtype, static_cast<rms_norm::Rounding>(rounding));
    return all_reduce_add_rms_norm_out(x, residual, weight, eps, rounding, group, empty_like(from, dtype),
                                       empty_like(from));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("all_reduce_add_rms_norm", INFINI_BOX(all_reduce_add_rms_norm));
    m.impl("all_reduce_add_rms_norm.out", INFINI_BOX(all_reduce_add_rms_norm_out));
}

} // namespace infini::collectives
