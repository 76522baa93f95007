// Checks of an op's arguments. A violation throws one sentence: which op, which argument, the rule, what came.
// "infini::rms_norm: weight must have shape [4096] ..., got [4095]". A check file names the op once (Checker
// rule("rms_norm")) and then states its rules. Views without memory (the C ABI's Create) pass the checks of overlap.
#pragma once

#include <initializer_list>
#include <string>

#include "status.h"
#include "tensor_view.h"

namespace infini {

// A sentence's "... to match the last dimension of x": where a required size comes from.
using Reason = const char *;

// Whether two views share a byte: exact, except that strides for which the search would take too long count as
// overlapping (overlap.cpp). Interleaved views, such as the halves of a fused buffer, do not overlap.
bool overlap(const TensorView &a, const TensorView &b);
// The two steps of overlap(): whether the views' memory spans intersect, a few comparisons; and, given that they do,
// whether elements overlap.
bool spans_overlap(const TensorView &a, const TensorView &b);
bool elements_overlap(const TensorView &a, const TensorView &b);

class Checker {
public:
    explicit constexpr Checker(const char *op) : op_(op) {}

    // Throws "infini::<op>: <argument> must <rule>, got <what came>".
    [[noreturn]] void fail(infiniStatus_t status, const char *argument, const std::string &rule,
                           const std::string &came) const;

    // low <= ndim <= high.
    void rank(const char *argument, const TensorView &view, int low, int high = -1) const;
    void dtype(const char *argument, const TensorView &view, std::initializer_list<infiniDtype_t> allowed) const;
    // The same dtype as another argument; or, where that is a half type, float32.
    void same_dtype(const char *argument, const TensorView &view, const char *other, const TensorView &as) const;
    void same_dtype_or_float32(const char *argument, const TensorView &view, const char *x_name,
                               const TensorView &x) const;
    void shape(const char *argument, const TensorView &view, std::initializer_list<int64_t> wanted, Reason why) const;
    void same_shape(const char *argument, const TensorView &view, const char *other, const TensorView &as) const;
    // A dimension of `view`; negative ones count from the last.
    void axis(const char *argument, int axis, const TensorView &view) const;
    // The output of a product with the rows of x: x's shape with `columns` in the last dimension ("out must have shape
    // [2, 8], <why>, got ..."), x's dtype, innermost stride 1, writable, no overlap with x.
    void rows_of_x(const char *argument, const TensorView &y, const TensorView &x, int64_t columns, Reason why) const;
    // Innermost stride 1 (any stride where the dimension has at most one element).
    void dense_last(const char *argument, const TensorView &view) const;
    void contiguous(const char *argument, const TensorView &view) const;
    // A tensor that is written may not overlap itself (a stride of 0).
    void writable(const char *argument, const TensorView &view) const;
    // Reading `in` while writing `out`: the two are the same elements, or share none.
    void no_partial_overlap(const char *argument, const TensorView &out, const char *other, const TensorView &in) const;
    // Reading `in` at any time while writing `out`: the two share no memory.
    void no_overlap(const char *argument, const TensorView &out, const char *other, const TensorView &in) const;
    // A number in [low, high]; NaN is refused too.
    void range(const char *argument, double value, double low, double high, const char *rule) const;

private:
    const char *op_;
};

// The dtypes that most ops support.
#define INFINI_FLOATS {INFINI_DTYPE_F32, INFINI_DTYPE_BF16, INFINI_DTYPE_F16}
#define INFINI_FLOATS_AND_DOUBLE {INFINI_DTYPE_F32, INFINI_DTYPE_BF16, INFINI_DTYPE_F16, INFINI_DTYPE_F64}
// Those of tensors that name rows, blocks or slots, or count them; indices.h reads both.
#define INFINI_INDICES {INFINI_DTYPE_I64, INFINI_DTYPE_I32}

} // namespace infini
