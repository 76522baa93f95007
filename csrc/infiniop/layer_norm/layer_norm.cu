// The CUDA kernel of layer_norm: one pass over memory, with the row in registers. Rows too long for registers (16384
// halves) and rows of ColumnReducer are read three times, twice of these from L2.
// Limit: memory bandwidth, one row read and one or two written: 4 or 6 bytes per bf16 element.
// SASS: norm_rows: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/strided_rows.cuh"
#include "layer_norm.h"

namespace infini::layer_norm {
namespace {

enum { kInput, kOutput, kStandardization, kDeviation, kTensors };

template <typename T, typename W> struct Job {
    const T *input;
    T *output, *standardization, *deviation; // the latter two may be nullptr
    const W *weight, *bias;                  // may be nullptr
    int64_t weight_step, bias_step;
    cuda::StridedRows<kTensors> rows;
    float eps;
};

template <typename T, typename W, typename Reducer>
__global__ void __launch_bounds__(Reducer::kMaxThreads, 1) norm_rows(const __grid_constant__ Job<T, W> a) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>;
    INFINI_SHARED(shared, float[Reducer::kShared]);
    const int64_t number = Reducer::number();
    const bool mine = number < a.rows.starts.count; // threads without a row in the last block still reach the barriers
    int64_t at[kTensors];
    a.rows.starts.locate(mine ? number : 0, at);
    Reducer reducer(a.input + at[kInput], mine ? a.rows.n : 0, a.rows, shared);

    const auto n = static_cast<float>(a.rows.n);
    const float mean = reducer.template reduce<cuda::Sum>(0.0f, [&](float &sum, int64_t, int, float (&v)[kWidth]) {
        for (int e = 0; e < kWidth; ++e) {
            sum += v[e];
        }
    }) / n;
    const float squares =
        reducer.template reduce<cuda::Sum>(0.0f, [&](float &sum, int64_t, int count, float (&v)[kWidth]) {
            for (int e = 0; e < kWidth; ++e) {
                const float difference = e < count ? v[e] - mean : 0;
                sum += difference * difference;
            }
        });
    const float deviation = sqrtf(squares / n + a.eps), scale = 1 / deviation;
    if (a.deviation != nullptr && mine && Reducer::thread() == 0) {
        cuda::narrow_to(a.deviation + at[kDeviation], deviation);
    }
    reducer.visit([&](int64_t i, int count, float (&v)[kWidth]) {
        const bool whole = reducer.whole(i);
        const auto store = [&](T *to, int tensor) {
            const int64_t step = a.rows.steps[tensor];
            cuda::store(to + at[tensor] + i * step, v, whole, count, step);
        };
        for (int e = 0; e < kWidth; ++e) {
            v[e] = (v[e] - mean) * scale;
        }
        if (a.standardization != nullptr) {
            store(a.standardization, kStandardization);
        }
        if (a.weight != nullptr) {
            float weight[kWidth];
            cuda::load(weight, a.weight + i * a.weight_step, whole, count, a.weight_step);
            for (int e = 0; e < kWidth; ++e) {
                v[e] *= weight[e];
            }
        }
        if (a.bias != nullptr) {
            float bias[kWidth];
            cuda::load(bias, a.bias + i * a.bias_step, whole, count, a.bias_step);
            for (int e = 0; e < kWidth; ++e) {
                v[e] += bias[e];
            }
        }
        store(a.output, kOutput);
    });
}

template <typename T, typename W> void launch(const ExecutionContext &context, const Args &args) {
    const bool with_statistics = args.standardization.dtype != INFINI_DTYPE_INVALID;
    TensorView deviation = args.deviation; // [..., 1]
    deviation.shape[deviation.ndim] = deviation.strides[deviation.ndim] = 1;
    ++deviation.ndim;
    const TensorView &output = args.output, &second = with_statistics ? args.standardization : output;
    const TensorView *const views[] = {&args.input, &output, &second, with_statistics ? &deviation : &output};
    Job<T, W> job{args.input.as<const T>(),
                  output.as<T>(),
                  args.standardization.as<T>(),
                  args.deviation.as<T>(),
                  args.weight.as<const W>(),
                  args.bias.as<const W>(),
                  args.weight.strides[0],
                  args.bias.strides[0],
                  cuda::StridedRows<kTensors>(views, cuda::kWidth<T>),
                  static_cast<float>(args.eps)};
    for (const TensorView *parameter : {&args.weight, &args.bias}) {
        if (parameter->dtype != INFINI_DTYPE_INVALID) {
            job.rows.whole = job.rows.whole && parameter->strides[0] == 1 && cuda::vectors_fit(*parameter);
        }
    }
    cuda::with_reducer<T>(job.rows, [&](auto reducer, dim3 grid, dim3 block) {
        cuda::launch(context, norm_rows<T, W, typename decltype(reducer)::type>, grid, block, 0, job);
    });
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.input.dtype, [&](auto x) {
        using T = decltype(x);
        if constexpr (!std::is_same_v<T, double>) {
            const bool wide = args.weight.dtype == INFINI_DTYPE_F32 || args.bias.dtype == INFINI_DTYPE_F32;
            wide ? launch<T, float>(context, args) : launch<T, T>(context, args);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::layer_norm
