// Plans products of many rows by quantized weights through cuBLAS: when to use it, the slices, and the workspace.
#include "many_rows.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "gemm/gemm.h"
#include "linear/weight_tiles.h"
#include "status.h"
#include "unpack.h"

namespace infini::many_rows {
namespace {

constexpr int64_t kMinSlice = 64;

// The distance between rows, if it is constant and at least the row length; else 0.
int64_t even_step(const TensorView &x) {
    int64_t step = 0, next = 0; // next: the stride that the preceding dimension must have
    for (int dim = x.ndim - 2; dim >= 0; --dim) {
        if (x.shape[dim] == 1) {
            continue;
        }
        if (step == 0) {
            step = x.strides[dim];
            if (step < x.size(-1)) {
                return 0;
            }
        } else if (x.strides[dim] != next) {
            return 0;
        }
        next = x.strides[dim] * x.shape[dim];
    }
    return step == 0 ? x.size(-1) : step; // there is a single row
}

bool has(const TensorView &optional) {
    return optional.dtype != INFINI_DTYPE_INVALID;
}

int64_t slice_of(int64_t n, int64_t most) {
    int64_t slice = kMinSlice;
    while (2 * slice <= most) {
        slice *= 2;
    }
    return n <= most || n <= slice ? n : slice;
}

} // namespace

int64_t slice_bytes() {
    const char *const text = std::getenv("INFINI_SLICE_BYTES");
    if (text == nullptr) {
        return kSliceBytes;
    }
    int64_t bytes = 0;
    const char *const end = text + std::strlen(text);
    const auto [stopped, error] = std::from_chars(text, end, bytes);
    if (error != std::errc() || stopped != end || bytes < 1) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message("infini: INFINI_SLICE_BYTES must be a number of bytes, at least 1, got ", text));
    }
    return bytes;
}

int64_t cublas_rows_from(const Problem &problem) {
    const bool tiles = size_of(problem.x.dtype) == 2;
    return tiles ? (problem.weight.dtype == INFINI_DTYPE_I8 ? 129 : 65) : 64;
}

bool takes(const Problem &problem) {
    const TensorView &x = problem.x, &weight = problem.weight;
    const int64_t n = weight.size(0);
    if (n == 0 || x.size(-1) == 0 || problem.y.numel() / n < cublas_rows_from(problem)) {
        return false;
    }
    if (x.dtype != INFINI_DTYPE_I8) {
        return true;
    }
    const auto fits = [](const TensorView &rows) {
        return reinterpret_cast<uintptr_t>(rows.data) % 4 == 0 && (rows.stride(1) == 1 || rows.size(1) == 1) &&
               (rows.size(0) == 1 || (rows.stride(0) % 4 == 0 && rows.stride(0) >= rows.size(1)));
    };
    return weight.dtype == INFINI_DTYPE_I8 && n > 1 && fits(x) && fits(weight);
}

Plan::Plan(const Problem &problem)
    : m(problem.y.numel() / problem.weight.size(0)), n(problem.weight.size(0)), k(problem.x.size(-1)),
      unpacks(problem.x.dtype != INFINI_DTYPE_I8), x_step(even_step(problem.x)), y_step(0), bytes(0) {
    const auto size = static_cast<int64_t>(size_of(problem.x.dtype));
    const int64_t row = unpack::padded(k) * size;
    if (!has(problem.row_scales) && !has(problem.column_scales) && !has(problem.bias)) {
        y_step = even_step(problem.y);
    }
    const int64_t row_sums = y_step > 0 ? 0 : m * static_cast<int64_t>(sizeof(float));
    const int64_t slice_row = unpacks && row > row_sums ? row : row_sums;
    slice = slice_of(n, (problem.slice_bytes > 0 ? problem.slice_bytes : slice_bytes()) / slice_row);
    const auto place = [&](int64_t needed) {
        const int64_t at = bytes;
        bytes += (needed + kAlignment - 1) / kAlignment * kAlignment;
        return at;
    };
    copied_x_at = place(x_step > 0 ? 0 : m * row);
    weight_at = place(unpacks ? slice * row : 0);
    sums_at = place(row_sums * padded_columns(slice));
    cublas_at = place(gemm::kWorkspaceBytes);
    bytes += kAlignment; // for aligning its start
}

size_t workspace_size(const Problem &problem) {
    return static_cast<size_t>(Plan(problem).bytes);
}

size_t workspace_of(const Problem &problem) {
    if (takes(problem)) {
        return workspace_size(problem);
    }
    const int64_t n = problem.weight.size(0), m = n > 0 ? problem.y.numel() / n : 0;
    const bool tiles = problem.x.dtype != INFINI_DTYPE_F32 && weight_tiles::fits(m, n, problem.weight.size(1));
    return tiles ? weight_tiles::workspace_bytes(m, n, problem.weight.size(1)) : 0;
}

} // namespace infini::many_rows
