// cuBLAS emulated: the few functions that csrc/infiniop/gemm/cublas.cu uses, with the documented rules, in plain loops.
// Matrices are column-major. A sum is added in the order of k in one accumulator, the least exact order that cuBLAS may
// use: floats in float, half types as tensor cores add (tensor_cores.h), int8 in int32.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../common/cuda/scalar_types.cuh"
#include "emulator.h"
#include "tensor_cores.h"

struct cublasContext {
    cudaStream_t stream = nullptr;
};

namespace {

using namespace infini;

constexpr int kInvalid = 7, kNotSupported = 15;
constexpr int kFloat = 0, kHalf = 2, kInt8 = 3, kInt32 = 10, kBfloat16 = 14;

template <typename T> float number(const void *p, int64_t i) {
    return cuda::widen(static_cast<const T *>(p)[i]);
}

float read(const void *p, int type, int64_t i) {
    switch (type) {
    case kHalf:
        return number<f16>(p, i);
    case kBfloat16:
        return number<bf16>(p, i);
    default:
        return number<float>(p, i);
    }
}

void write(void *p, int type, int64_t i, float value) {
    switch (type) {
    case kHalf:
        return cuda::narrow_to(static_cast<f16 *>(p) + i, value);
    case kBfloat16:
        return cuda::narrow_to(static_cast<bf16 *>(p) + i, value);
    default:
        static_cast<float *>(p)[i] = value;
    }
}

int64_t size_of_type(int type) {
    return type == kInt8 ? 1 : type == kHalf || type == kBfloat16 ? 2 : 4;
}

const void *at(const void *p, int type, int64_t i) {
    return static_cast<const char *>(p) + i * size_of_type(type);
}

// Copies op(x) of one matrix of the batch, row by row.
template <typename Number>
std::vector<Number> rows_of(const void *x, int type, bool transposed, int64_t ld, int64_t rows, int64_t columns) {
    std::vector<Number> all(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
            const int64_t from = transposed ? i * ld + j : j * ld + i;
            if constexpr (std::is_same_v<Number, int32_t>) {
                all[static_cast<size_t>(i * columns + j)] = static_cast<const int8_t *>(x)[from];
            } else {
                all[static_cast<size_t>(i * columns + j)] = read(x, type, from);
            }
        }
    }
    return all;
}

// c = alpha * a @ b + beta * c; b^T has been copied row by row.
template <typename Number, typename Write>
void multiply(const std::vector<Number> &a, const std::vector<Number> &b, int64_t m, int64_t n, int64_t k, bool halves,
              const Write &write_sum) {
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            const Number *const row = a.data() + i * k, *const column = b.data() + j * k;
            Number sum = 0;
            if (halves) {
                sum = static_cast<Number>(infini::emulation::add_products(
                    0, k, [&](int64_t p) { return static_cast<double>(row[p]) * static_cast<double>(column[p]); }));
            } else {
                for (int64_t p = 0; p < k; ++p) {
                    sum += row[p] * column[p];
                }
            }
            write_sum(i, j, sum);
        }
    }
}

} // namespace

INFINI_EMULATED int cublasCreate_v2(cublasContext **handle) {
    *handle = new cublasContext;
    return 0;
}

INFINI_EMULATED int cublasSetStream_v2(cublasContext *handle, cudaStream_t stream) {
    handle->stream = stream;
    return 0;
}

INFINI_EMULATED int cublasSetWorkspace_v2(cublasContext *, void *workspace, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        return kInvalid;
    }
    const size_t end = bytes < 4096 ? bytes : 4096;
    std::memset(workspace, 0xff, end); // so that a workspace that is in use elsewhere shows
    std::memset(static_cast<char *>(workspace) + bytes - end, 0xff, end);
    return 0;
}

INFINI_EMULATED int cublasSetMathMode(cublasContext *, int) {
    return 0;
}

INFINI_EMULATED int cublasGemmStridedBatchedEx_64(cublasContext *handle, int transpose_a, int transpose_b, int64_t m,
                                                  int64_t n, int64_t k, const void *alpha, const void *a, int a_type,
                                                  int64_t lda, long long a_step, const void *b, int b_type, int64_t ldb,
                                                  long long b_step, const void *beta, void *c, int c_type, int64_t ldc,
                                                  long long c_step, int64_t batch, int compute_type, int) {
    const auto least = [](int64_t size) { return size > 1 ? size : 1; };
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < least(transpose_a ? k : m) || ldb < least(transpose_b ? n : k) ||
        ldc < least(m)) {
        return kInvalid;
    }
    const bool integers = compute_type == 72;
    if (a_type != b_type || integers != (a_type == kInt8) || integers != (c_type == kInt32) ||
        (!integers && c_type != a_type && c_type != kFloat)) {
        return kNotSupported;
    }
    const auto aligned = [](const void *p, int64_t ld) { return (reinterpret_cast<uintptr_t>(p) | ld) % 4 == 0; };
    if (integers && !(aligned(a, lda) && aligned(b, ldb) && a_step % 4 == 0 && b_step % 4 == 0)) {
        return kNotSupported;
    }
    float scale = 1, kept = 0;
    int32_t scale_integer = 1, kept_integer = 0;
    std::memcpy(integers ? static_cast<void *>(&scale_integer) : &scale, alpha, 4);
    std::memcpy(integers ? static_cast<void *>(&kept_integer) : &kept, beta, 4);
    infini::emulation::enqueue(handle->stream, [=] {
        for (int64_t entry = 0; entry < batch; ++entry) {
            const void *const left = at(a, a_type, entry * a_step), *const right = at(b, b_type, entry * b_step);
            void *const out = const_cast<void *>(at(c, c_type, entry * c_step));
            if (integers) {
                multiply(rows_of<int32_t>(left, a_type, transpose_a != 0, lda, m, k),
                         rows_of<int32_t>(right, b_type, transpose_b == 0, ldb, n, k), m, n, k, false,
                         [&](int64_t i, int64_t j, int32_t sum) {
                             int32_t &to = static_cast<int32_t *>(out)[j * ldc + i];
                             to = scale_integer * sum + (kept_integer == 0 ? 0 : kept_integer * to);
                         });
            } else {
                multiply(rows_of<float>(left, a_type, transpose_a != 0, lda, m, k),
                         rows_of<float>(right, b_type, transpose_b == 0, ldb, n, k), m, n, k, a_type != kFloat,
                         [&](int64_t i, int64_t j, float sum) {
                             const int64_t to = j * ldc + i;
                             const float product = scale == 0 ? 0 : scale * sum;
                             write(out, c_type, to, kept == 0 ? product : product + kept * read(out, c_type, to));
                         });
            }
        }
    });
    return 0;
}
