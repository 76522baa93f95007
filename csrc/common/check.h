// Checks of an op's arguments. A violation throws one sentence with op, argument, rule and actual value:
// "infini::rms_norm: weight must have shape [4096] ..., got [4095]". A check names the op once, Checker
// rule("rms_norm"), and then states its rules. Views without memory (Create of the C ABI) pass the overlap checks.
#pragma once

#include <initializer_list>
#include <string>

#include "status.h"
#include "tensor_view.h"

namespace infini {

// The end of a message that says where a required size comes from: "to match the last dimension of x".
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
    // The same dtype as another argument, or float32 if that argument is a half type.
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
    // Innermost stride 1; any stride is accepted if that dimension has at most one element.
    void dense_last(const char *argument, const TensorView &view) const;
    void contiguous(const char *argument, const TensorView &view) const;
    // A tensor to be written must not overlap itself, for example by a stride of 0.
    void writable(const char *argument, const TensorView &view) const;
    // For kernels that read an element of `in` before they write it to `out`: equal elements, or no shared memory.
    void no_partial_overlap(const char *argument, const TensorView &out, const char *other, const TensorView &in) const;
    // For kernels that read `in` at any time while they write `out`: no shared memory.
    void no_overlap(const char *argument, const TensorView &out, const char *other, const TensorView &in) const;
    // A number in [low, high]; NaN fails.
    void range(const char *argument, double value, double low, double high, const char *rule) const;

private:
    const char *op_;
};

// The dtypes that most ops support.
#define INFINI_FLOATS {INFINI_DTYPE_F32, INFINI_DTYPE_BF16, INFINI_DTYPE_F16}
#define INFINI_FLOATS_AND_DOUBLE {INFINI_DTYPE_F32, INFINI_DTYPE_BF16, INFINI_DTYPE_F16, INFINI_DTYPE_F64}
// The dtypes of tensors with row, block or slot indices, or with counts. indices.h reads both.
#define INFINI_INDICES {INFINI_DTYPE_I64, INFINI_DTYPE_I32}

} // namespace infini
