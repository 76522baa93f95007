// The checks of check.h and their messages. Formatting happens on failure only: a check that passes costs a few
// comparisons.
#include "check.h"

#include <cmath>
#include <cstring>

#include "scratch.h"

namespace infini {

namespace {

std::string list_of(const int64_t *values, int n) {
    std::string text = "[";
    for (int i = 0; i < n; ++i) {
        text += (i ? ", " : "") + std::to_string(values[i]);
    }
    return text + "]";
}

bool is_empty(const TensorView &view) {
    return view.numel() == 0;
}

bool same_elements(const TensorView &a, const TensorView &b) {
    if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) {
        return false;
    }
    for (int i = 0; i < a.ndim; ++i) {
        if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != b.strides[i])) {
            return false;
        }
    }
    return true;
}

} // namespace

std::string shape_of(const TensorView &view) {
    return list_of(view.shape, view.ndim);
}

std::string strides_of(const TensorView &view) {
    return list_of(view.strides, view.ndim);
}

void Checker::fail(infiniStatus_t status, const char *argument, const std::string &rule,
                   const std::string &came) const {
    throw Error(status, message("infini::", op_, ": ", argument, " must ", rule, ", got ", came));
}

void Checker::rank(const char *argument, const TensorView &view, int low, int high) const {
    high = high < 0 ? low : high;
    if (view.ndim < low || view.ndim > high) {
        const std::string wanted = low == high ? std::to_string(low) : message(low, " to ", high);
        fail(INFINI_STATUS_BAD_TENSOR_SHAPE, argument,
             message("have ", wanted, wanted == "1" ? " dimension" : " dimensions"),
             message(view.ndim, " (shape ", shape_of(view), ")"));
    }
}

void Checker::dtype(const char *argument, const TensorView &view, std::initializer_list<infiniDtype_t> allowed) const {
    cpu::scratch_is_for(op_);
    for (const infiniDtype_t dtype : allowed) {
        if (view.dtype == dtype) {
            return;
        }
    }
    std::string names;
    size_t left = allowed.size();
    for (const infiniDtype_t dtype : allowed) {
        --left;
        names += message(name_of(dtype), left == 0 ? "" : left == 1 ? " or " : ", ");
    }
    fail(INFINI_STATUS_BAD_TENSOR_DTYPE, argument, "be " + names, name_of(view.dtype));
}

void Checker::same_dtype(const char *argument, const TensorView &view, const char *other, const TensorView &as) const {
    if (view.dtype != as.dtype) {
        fail(INFINI_STATUS_BAD_TENSOR_DTYPE, argument, message("have the dtype of ", other, ", ", name_of(as.dtype)),
             name_of(view.dtype));
    }
}

void Checker::same_dtype_or_float32(const char *argument, const TensorView &view, const char *x_name,
                                    const TensorView &x) const {
    if (!is_half(x.dtype)) {
        return same_dtype(argument, view, x_name, x);
    }
    if (view.dtype != x.dtype && view.dtype != INFINI_DTYPE_F32) {
        fail(INFINI_STATUS_BAD_TENSOR_DTYPE, argument,
             message("have the dtype of ", x_name, ", ", name_of(x.dtype), ", or float32"), name_of(view.dtype));
    }
}

void Checker::shape(const char *argument, const TensorView &view, std::initializer_list<int64_t> wanted,
                    Reason why) const {
    bool equal = view.ndim == static_cast<int>(wanted.size());
    for (int i = 0; equal && i < view.ndim; ++i) {
        equal = view.shape[i] == wanted.begin()[i];
    }
    if (!equal) {
        fail(INFINI_STATUS_BAD_TENSOR_SHAPE, argument,
             message("have shape ", list_of(wanted.begin(), static_cast<int>(wanted.size())), " ", why),
             shape_of(view));
    }
}

void Checker::rows_of_x(const char *argument, const TensorView &y, const TensorView &x, int64_t columns,
                        Reason why) const {
    TensorView wanted = x;
    wanted.shape[x.ndim - 1] = columns;
    bool equal = y.ndim == x.ndim;
    for (int i = 0; equal && i < y.ndim; ++i) {
        equal = y.shape[i] == wanted.shape[i];
    }
    if (!equal) {
        fail(INFINI_STATUS_BAD_TENSOR_SHAPE, argument, message("have shape ", shape_of(wanted), ", ", why),
             shape_of(y));
    }
    same_dtype(argument, y, "x", x);
    dense_last(argument, y);
    writable(argument, y);
    no_overlap(argument, y, "x", x);
}

void Checker::same_shape(const char *argument, const TensorView &view, const char *other, const TensorView &as) const {
    bool equal = view.ndim == as.ndim;
    for (int i = 0; equal && i < view.ndim; ++i) {
        equal = view.shape[i] == as.shape[i];
    }
    if (!equal) {
        fail(INFINI_STATUS_BAD_TENSOR_SHAPE, argument, message("have the shape of ", other, ", ", shape_of(as)),
             shape_of(view));
    }
}

void Checker::axis(const char *argument, int axis, const TensorView &view) const {
    if (axis < -view.ndim || axis >= view.ndim) {
        fail(INFINI_STATUS_BAD_PARAM, argument, message("be in [", -view.ndim, ", ", view.ndim - 1, "]"),
             std::to_string(axis));
    }
}

void Checker::dense_last(const char *argument, const TensorView &view) const {
    if (view.ndim > 0 && view.size(-1) > 1 && view.stride(-1) != 1 && !is_empty(view)) {
        fail(INFINI_STATUS_BAD_TENSOR_STRIDES, argument,
             "have stride 1 in its last dimension (call .contiguous() on it)", message("strides ", strides_of(view)));
    }
}

void Checker::contiguous(const char *argument, const TensorView &view) const {
    int64_t expected = 1;
    bool holds = true;
    for (int dim = view.ndim - 1; dim >= 0; --dim) {
        holds = holds && (view.shape[dim] <= 1 || view.strides[dim] == expected);
        expected *= view.shape[dim];
    }
    if (!holds && !is_empty(view)) {
        fail(INFINI_STATUS_BAD_TENSOR_STRIDES, argument, "be contiguous", message("strides ", strides_of(view)));
    }
}

void Checker::writable(const char *argument, const TensorView &view) const {
    for (int i = 0; i < view.ndim; ++i) {
        if (view.shape[i] > 1 && view.strides[i] == 0 && !is_empty(view)) {
            fail(INFINI_STATUS_BAD_TENSOR_STRIDES, argument, "not be a broadcast view, for it is written to",
                 message("strides ", strides_of(view)));
        }
    }
}

void Checker::no_partial_overlap(const char *argument, const TensorView &out, const char *other,
                                 const TensorView &in) const {
    if (spans_overlap(out, in) && !same_elements(out, in) && elements_overlap(out, in)) {
        fail(INFINI_STATUS_BAD_PARAM, argument, message("be ", other, " itself or share no memory with it"),
             "one whose span of memory overlaps it");
    }
}

void Checker::no_overlap(const char *argument, const TensorView &out, const char *other, const TensorView &in) const {
    if (overlap(out, in)) {
        fail(INFINI_STATUS_BAD_PARAM, argument, message("share no memory with ", other),
             "one whose span of memory overlaps it");
    }
}

void Checker::range(const char *argument, double value, double low, double high, const char *rule) const {
    if (!(value >= low && value <= high)) {
        // Most rule texts leave out the upper limit (float's largest number) because few values exceed it: add it here.
        const bool unsaid = value > high && std::isfinite(value) && std::strstr(rule, "at most") == nullptr &&
                            std::strstr(rule, "in float32") == nullptr;
        fail(INFINI_STATUS_BAD_PARAM, argument, unsaid ? message(rule, " and at most ", high) : rule, message(value));
    }
}

} // namespace infini
