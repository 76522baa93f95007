// The CUDA kernel of rms_norm and add_rms_norm: one pass, with the row in the registers of the threads that share it.
// Limit: memory bandwidth, as on the CPU. Rows too long for registers (16384 halves) are read a second time.
// SASS: norm_rows: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "rms_norm.h"

namespace infini::rms_norm {
namespace {

using cuda::Compute;
using cuda::RowPart;
using cuda::RowPlan;
using cuda::RowStrides;

template <typename T> struct Row {
    const T *x, *residual; // residual is nullptr for plain rms_norm
    void *y;
    T *h;
    const void *weight;
    int64_t n;
    RowStrides<4> rows; // x, y, h, residual
    Compute<T> eps;
    Rounding rounding; // one of the first three
    bool whole;        // all tensors allow vector accesses
};

// y = v * factor * w for the elements of one vector.
template <typename T, typename Y, int kCount>
__device__ void scale(Rounding rounding, Y *y, bool whole, int count, const Compute<T> (&v)[kCount],
                      const Compute<T> (&w)[kCount], Compute<T> factor) {
    Compute<T> out[kCount];
    const auto each = [&](const auto &formula) { // a uniform branch
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            out[e] = formula(v[e] * factor, w[e]);
        }
    };
    switch (rounding) {
    case Rounding::kLlama:
        each([](Compute<T> value, Compute<T> weight) { return cuda::round_to<T>(value) * weight; });
        break;
    case Rounding::kGemma:
        each([](Compute<T> value, Compute<T> weight) { return value * (1 + weight); });
        break;
    default:
        each([](Compute<T> value, Compute<T> weight) { return value * weight; });
    }
    cuda::store(y, out, whole, count);
}

// kWide: y is the norm of x + residual before the sum is rounded to h; T is a half type.
template <typename T, typename W, int kVectors, bool kWide>
__global__ void __launch_bounds__(512, 1) norm_rows(const __grid_constant__ Row<T> a) {
    cuda::grid_dependency_sync();
    using C = Compute<T>;
    INFINI_SHARED(sums, C[32]);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool mine = row < a.rows.count; // threads without a row in the last block still reach the barriers
    int64_t at[4];
    a.rows.locate(mine ? row : 0, at);
    const int64_t n = mine ? a.n : 0;

    // Weights as wide as x are loaded before the sum; other weights use other vectors.
    constexpr bool kEarly = sizeof(T) == sizeof(W) && kVectors > 0;
    const auto *weight = static_cast<const W *>(a.weight);
    using Part = RowPart<T, kVectors, std::conditional_t<kWide && (kVectors > 0), C, T>>;
    Part part(a.x + at[0], n, a.whole);
    const RowPart<std::conditional_t<kEarly, W, T>, kVectors> weights(
        reinterpret_cast<const std::conditional_t<kEarly, W, T> *>(weight), kEarly ? n : 0, a.whole);
    C squares = 0;
    const auto add_squares = [&](const C(&v)[cuda::kWidth<T>]) {
#pragma unroll
        for (int e = 0; e < cuda::kWidth<T>; ++e) {
            squares += v[e] * v[e];
        }
    };
    const auto add_residual = [&](int64_t i, int count, C(&v)[cuda::kWidth<T>]) {
        C r[cuda::kWidth<T>];
        cuda::load(r, a.residual + at[3] + i, part.whole(i), count);
#pragma unroll
        for (int e = 0; e < cuda::kWidth<T>; ++e) {
            v[e] = kWide ? v[e] + r[e] : cuda::round_to<T>(v[e] + r[e]);
        }
    };
    const auto store_sum = [&](int64_t i, int count, const C(&v)[cuda::kWidth<T>]) {
        cuda::store(a.h + at[2] + i, v, part.whole(i), count);
    };
    // Neither registers nor h have a long row's wide sum: both passes add.
    constexpr bool kAddsTwice = kWide && kVectors == 0;
    if constexpr (kAddsTwice) {
        part.visit([&](int64_t i, int count, C(&v)[cuda::kWidth<T>]) {
            add_residual(i, count, v);
            add_squares(v);
        });
    } else if (a.residual == nullptr) {
        part.visit([&](int64_t, int, const C(&v)[cuda::kWidth<T>]) { add_squares(v); });
    } else {
        part.update([&](int64_t i, int count, C(&v)[cuda::kWidth<T>]) {
            add_residual(i, count, v);
            store_sum(i, count, v);
            add_squares(v);
        });
    }
    squares = cuda::row_reduce<cuda::Sum>(squares, sums);
    const C factor = 1 / sqrt(squares / static_cast<C>(a.n) + a.eps);

    const auto finish = [&](int64_t i, int count, const C(&v)[cuda::kWidth<T>], const C(&w)[cuda::kWidth<T>]) {
        if (std::is_same_v<T, W> || a.rounding != Rounding::kLlama) {
            scale<T>(a.rounding, static_cast<T *>(a.y) + at[1] + i, part.whole(i), count, v, w, factor);
        } else { // the output has the dtype of the weight, which is wider
            scale<T>(a.rounding, static_cast<W *>(a.y) + at[1] + i, part.whole(i), count, v, w, factor);
        }
    };
    const auto finish_all = [&](Part &values) {
        if constexpr (kEarly) {
            values.visit_with(weights, finish);
        } else {
            values.visit([&](int64_t i, int count, C(&v)[cuda::kWidth<T>]) {
                if constexpr (kAddsTwice) {
                    add_residual(i, count, v);
                    store_sum(i, count, v);
                }
                C w[cuda::kWidth<T>];
                cuda::load(w, weight + i, part.whole(i), count);
                finish(i, count, v, w);
            });
        }
    };
    if (kVectors == 0 && !kWide && a.residual != nullptr) { // until the sum, which the second pass reads, is written
        Part sum(a.h + at[2], n, a.whole);
        finish_all(sum);
    } else {
        finish_all(part);
    }
}

template <typename T, typename W> void launch(const ExecutionContext &context, const Args &args) {
    const bool with_residual = args.h.dtype != INFINI_DTYPE_INVALID;
    const TensorView &h = with_residual ? args.h : args.x, &residual = with_residual ? args.residual : args.x;
    const TensorView *const views[] = {&args.x, &args.y, &h, &residual};
    const Row<T> row{args.x.as<const T>(),
                     with_residual ? residual.as<const T>() : nullptr,
                     args.y.data,
                     h.as<T>(),
                     args.weight.data,
                     args.x.size(-1),
                     RowStrides<4>(views),
                     static_cast<Compute<T>>(args.eps),
                     order_of(args.rounding),
                     cuda::vectors_fit(args.x, args.y, h, residual, args.weight)};
    const RowPlan plan(row.rows.count, row.n, cuda::kWidth<T>);
    const auto run = [&](auto wide) {
        cuda::with_vectors(plan.vectors, [&](auto vectors) {
            const auto kernel = norm_rows<T, W, vectors.value, wide.value>;
            cuda::launch(context, kernel, cuda::grid_x(plan.blocks), plan.block(), 0, row);
        });
    };
    if constexpr (sizeof(T) == 2) { // float is as wide as its sum
        if (with_residual && is_wide(args.rounding)) {
            return run(std::true_type{});
        }
    }
    run(std::false_type{});
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.x.dtype, [&](auto x) {
        using T = decltype(x);
        if (args.weight.dtype == args.x.dtype) {
            launch<T, T>(context, args);
        } else if constexpr (sizeof(T) == 2) {
            if (args.weight.dtype == INFINI_DTYPE_F32) {
                launch<T, float>(context, args);
            } else {
                launch<T, std::conditional_t<std::is_same_v<T, bf16>, f16, bf16>>(context, args);
            }
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::rms_norm
