// cuBLAS emulated: the functions that csrc/infiniop/gemm/cublas_functions.h names, by the documented rules, in plain
// loops.
// Matrices are column-major. A sum is added in the order of k in one accumulator, the least exact order that cuBLAS may
// use: floats in float, half types as tensor cores add (tensor_cores.h), int8 in int32.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../common/cuda/scalar_types.cuh"
#include "../infiniop/gemm/cublas_functions.h"
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

float rounded(float value, int type) {
    float as_held = 0;
    write(&as_held, type, 0, value);
    return read(&as_held, type, 0);
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
                             write(out, c_type, to,
                                   kept == 0
                                       ? product
                                       : rounded(product, c_type) + kept * read(out, c_type, to)); // as on an H100
                         });
            }
        }
    });
    return 0;
}

// ---- cuBLASLt: a product with a bias ----

struct cublasLtMatmulDescOpaque_t {
    int transpose_a = 0, transpose_b = 0;
    uint32_t epilogue = 1;
    const void *bias = nullptr;
};

struct cublasLtMatrixLayoutOpaque_t {
    int type;
    int64_t rows, columns, ld;
};

struct cublasLtMatmulPreferenceOpaque_t {
    uint32_t alignment[4] = {256, 256, 256, 256};
};

INFINI_EMULATED int cublasLtMatmulDescCreate(cublasLtMatmulDescOpaque_t **product, int compute_type, int scale_type) {
    *product = new cublasLtMatmulDescOpaque_t;
    return compute_type == 68 && scale_type == kFloat ? 0 : kNotSupported;
}

INFINI_EMULATED int cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t *product, int attribute,
                                                   const void *value, size_t bytes) {
    const auto set = [&](auto &field) {
        std::memcpy(&field, value, sizeof field);
        return bytes == sizeof field ? 0 : kInvalid;
    };
    switch (attribute) {
    case 3:
        return set(product->transpose_a);
    case 4:
        return set(product->transpose_b);
    case 7:
        return set(product->epilogue);
    case 8:
        return set(product->bias);
    default:
        return kInvalid;
    }
}

INFINI_EMULATED int cublasLtMatmulDescDestroy(cublasLtMatmulDescOpaque_t *product) {
    delete product;
    return 0;
}

INFINI_EMULATED int cublasLtMatrixLayoutCreate(cublasLtMatrixLayoutOpaque_t **layout, int type, uint64_t rows,
                                               uint64_t columns, int64_t ld) {
    *layout = new cublasLtMatrixLayoutOpaque_t{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld};
    return ld >= static_cast<int64_t>(rows > 1 ? rows : 1) ? 0 : kInvalid;
}

INFINI_EMULATED int cublasLtMatrixLayoutDestroy(cublasLtMatrixLayoutOpaque_t *layout) {
    delete layout;
    return 0;
}

INFINI_EMULATED int cublasLtMatmulPreferenceCreate(cublasLtMatmulPreferenceOpaque_t **preference) {
    *preference = new cublasLtMatmulPreferenceOpaque_t;
    return 0;
}

INFINI_EMULATED int cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t *preference, int attribute,
                                                         const void *value, size_t bytes) {
    if (attribute >= 5 && attribute <= 8) {
        std::memcpy(&preference->alignment[attribute - 5], value, sizeof(uint32_t));
    }
    return bytes == (attribute == 1 ? sizeof(size_t) : sizeof(uint32_t)) ? 0 : kInvalid;
}

INFINI_EMULATED int cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreferenceOpaque_t *preference) {
    delete preference;
    return 0;
}

// The algorithm keeps the alignment that it was chosen for, which the product checks.
INFINI_EMULATED int cublasLtMatmulAlgoGetHeuristic(cublasContext *, cublasLtMatmulDescOpaque_t *,
                                                   cublasLtMatrixLayoutOpaque_t *a, cublasLtMatrixLayoutOpaque_t *b,
                                                   cublasLtMatrixLayoutOpaque_t *c, cublasLtMatrixLayoutOpaque_t *,
                                                   cublasLtMatmulPreferenceOpaque_t *preference, int wanted,
                                                   cublasLtMatmulHeuristicResult_t *results, int *found) {
    const auto fits = [&](const cublasLtMatrixLayoutOpaque_t *x, int i) {
        return preference->alignment[i] % size_of_type(x->type) == 0;
    };
    *found = wanted > 0 && fits(a, 0) && fits(b, 1) && fits(c, 2) && fits(c, 3) ? 1 : 0;
    results[0] = {};
    std::memcpy(results[0].algorithm, preference->alignment, sizeof preference->alignment);
    return *found > 0 ? 0 : kNotSupported;
}

INFINI_EMULATED int cublasLtMatmul(cublasContext *, cublasLtMatmulDescOpaque_t *product, const void *, const void *a,
                                   cublasLtMatrixLayoutOpaque_t *a_layout, const void *b,
                                   cublasLtMatrixLayoutOpaque_t *b_layout, const void *, const void *,
                                   cublasLtMatrixLayoutOpaque_t *, void *d, cublasLtMatrixLayoutOpaque_t *d_layout,
                                   const uint64_t *algorithm, void *workspace, size_t workspace_bytes,
                                   cudaStream_t stream) {
    uint32_t alignment[4];
    std::memcpy(alignment, algorithm, sizeof alignment);
    const void *const operands[] = {a, b, d, d};
    for (int i = 0; i < 4; ++i) {
        if (reinterpret_cast<uintptr_t>(operands[i]) % alignment[i] != 0) {
            return kInvalid;
        }
    }
    if (product->epilogue != 4 || product->bias == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        return kInvalid;
    }
    std::memset(workspace, 0xff, workspace_bytes < 4096 ? workspace_bytes : 4096); // as cublasSetWorkspace does here
    const cublasLtMatrixLayoutOpaque_t left = *a_layout, right = *b_layout, out = *d_layout;
    const cublasLtMatmulDescOpaque_t how = *product;
    const int64_t k = how.transpose_a != 0 ? left.rows : left.columns;
    infini::emulation::enqueue(stream, [=] {
        multiply(rows_of<float>(a, left.type, how.transpose_a != 0, left.ld, out.rows, k),
                 rows_of<float>(b, right.type, how.transpose_b == 0, right.ld, out.columns, k), out.rows, out.columns,
                 k, left.type != kFloat, [&](int64_t i, int64_t j, float sum) {
                     write(d, out.type, j * out.ld + i, sum + read(how.bias, out.type, i));
                 });
    });
    return 0;
}
