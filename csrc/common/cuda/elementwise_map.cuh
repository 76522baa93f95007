// Elementwise kernels on CUDA: y[i] = f(x0[i], ...) for views of equal shape and any strides; y may be one of the x.
// Dense last dimensions are accessed in vectors of 16 bytes, others element by element; a thread issues four
// independent loads before it computes. Limit: memory bandwidth.
#pragma once

#include "../layout.h"
#include "int_divider.cuh"
#include "launch.cuh"
#include "packed32.cuh"

namespace infini::cuda {

// Each launch has fewer elements than this.
constexpr int64_t kMaxElements = int64_t{1} << 31;

// Maps a unit's linear index to its offset in several tensors of equal shape. A unit is one element, or a vector of
// `width` elements along the last dimension (the last vector may be shorter). Indices are below 2^31.
template <int kTensors> struct OffsetCalculator {
    int ndim;
    uint32_t units = 1;
    IntDivider<uint32_t> sizes[kMaxDims];
    int64_t strides[kTensors][kMaxDims];

    OffsetCalculator(const TensorView (&views)[kTensors], int width) : ndim(views[0].ndim) {
        for (int dim = 0; dim < ndim; ++dim) {
            const int step = dim + 1 == ndim ? width : 1;
            const auto size = static_cast<uint32_t>((views[0].shape[dim] + step - 1) / step);
            sizes[dim] = IntDivider<uint32_t>(size);
            units *= size;
            for (int t = 0; t < kTensors; ++t) {
                strides[t][dim] = views[t].strides[dim] * step;
            }
        }
    }

    // Writes the unit's offset in each tensor, in elements; returns the unit's index along the last dimension.
    __device__ __forceinline__ uint32_t locate(uint32_t unit, int64_t (&at)[kTensors]) const {
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
            at[t] = 0;
        }
        uint32_t rest = unit, last = unit;
#pragma unroll 1
        for (int dim = ndim - 1; dim > 0; --dim) {
            const uint32_t quotient = sizes[dim].quotient(rest), index = rest - quotient * sizes[dim].divisor;
            last = dim == ndim - 1 ? index : last;
            rest = quotient;
#pragma unroll
            for (int t = 0; t < kTensors; ++t) {
                at[t] += index * strides[t][dim];
            }
        }
#pragma unroll
        for (int t = 0; t < kTensors; ++t) { // usually the only dimension: no division
            at[t] += rest * strides[t][0];
        }
        return last;
    }
};

template <typename T, int kCount> __device__ __forceinline__ Packed32<T, kCount> repeated(T value) {
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        vector.values[i] = value;
    }
    return bit_cast<Packed32<T, kCount>>(vector);
}

template <typename T, int kInputs> struct Elements {
    T *y;
    const T *x[kInputs];
    T numbers[kInputs]; // the scalar that replaces an x
    bool is_number[kInputs];
    bool is_one_a_row[kInputs]; // stride 0 in the last dimension
    int64_t last;               // size of the last dimension
    OffsetCalculator<kInputs + 1> walk;
};

constexpr int kElementThreads = 128;

template <int kInputs, int kWidth> constexpr int kUnits = kInputs < 4 && kWidth > 1 ? 4 / kInputs : 4;

template <int kWidth, typename T, int kInputs, typename Function>
__global__ void __launch_bounds__(kElementThreads)
    map_elements(const __grid_constant__ Elements<T, kInputs> a, const __grid_constant__ Function function) {
    cuda::grid_dependency_sync();
    constexpr int kCount = kUnits<kInputs, kWidth>;
    const uint32_t first = blockIdx.x * (kCount * kElementThreads) + threadIdx.x;
    Packed32<T, kWidth> x[kInputs][kCount];
    T *y[kCount];
    int left[kCount]; // elements of the unit, at most kWidth; 0: the unit does not exist
    const T *from[kInputs][kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
        const uint32_t unit = first + u * kElementThreads;
        int64_t at[kInputs + 1];
        const int64_t begin = static_cast<int64_t>(a.walk.locate(unit, at)) * kWidth;
        left[u] = unit < a.walk.units ? static_cast<int>(min(a.last - begin, int64_t{kWidth})) : 0;
        y[u] = a.y + at[0];
#pragma unroll
        for (int t = 0; t < kInputs; ++t) {
            from[t][u] = a.x[t] + at[1 + t];
        }
    }
#pragma unroll
    for (int t = 0; t < kInputs; ++t) {
        if (a.is_number[t]) {
#pragma unroll
            for (int u = 0; u < kCount; ++u) {
                x[t][u] = repeated<T, kWidth>(a.numbers[t]);
            }
        } else if (a.is_one_a_row[t]) {
#pragma unroll
            for (int u = 0; u < kCount; ++u) {
                x[t][u] = repeated<T, kWidth>(left[u] > 0 ? *from[t][u] : T{});
            }
        } else {
#pragma unroll
            for (int u = 0; u < kCount; ++u) {
                x[t][u] = load_packed32<T, kWidth>(from[t][u], left[u] == kWidth, left[u]);
            }
        }
    }
    Vector<T, kWidth> results[kCount];
    function([&](const auto &formula) {
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
            Vector<T, kWidth> values[kInputs];
#pragma unroll
            for (int t = 0; t < kInputs; ++t) {
                values[t] = bit_cast<Vector<T, kWidth>>(x[t][u]);
            }
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
                T &result = results[u].values[e];
                if constexpr (kInputs == 1) {
                    result = formula(values[0].values[e]);
                } else if constexpr (kInputs == 2) {
                    result = formula(values[0].values[e], values[1].values[e]);
                } else {
                    result = formula(values[0].values[e], values[1].values[e], values[2].values[e]);
                }
            }
        }
    });
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
        store_packed32(y[u], results[u], left[u] == kWidth, left[u]);
    }
}

// y = f(x...) for non-empty views {y, x...} of equal shape and element type T. The last `numbers` inputs are scalars in
// host memory. function(each) calls each(formula), where formula(x...) computes one element; the formula is copied to
// the GPU.
template <typename T, int kInputs, typename Function>
void map(const ExecutionContext &context, TensorView (&views)[kInputs + 1], int numbers, const Function &function) {
    coalesce_dims(views);
    for_each_part(views, kMaxElements - 1, [&](const TensorView(&part)[kInputs + 1]) {
        Elements<T, kInputs> a{part[0].template as<T>(), {}, {}, {}, {}, part[0].size(-1), {part, 1}};
        bool vectors = part[0].stride(-1) == 1 && vectors_fit(part[0]);
        for (int t = 0; t < kInputs; ++t) {
            const TensorView &x = part[1 + t];
            a.is_number[t] = t >= kInputs - numbers;
            a.is_one_a_row[t] = x.stride(-1) == 0;
            if (a.is_number[t]) {
                a.numbers[t] = *x.template as<const T>();
            } else {
                a.x[t] = x.template as<const T>();
                vectors = vectors && (a.is_one_a_row[t] || (x.stride(-1) == 1 && vectors_fit(x)));
            }
        }
        const auto run = [&](auto width) {
            constexpr int kPerBlock = kUnits<kInputs, width.value> * kElementThreads;
            a.walk = OffsetCalculator<kInputs + 1>(part, width.value);
            const int64_t blocks = (static_cast<int64_t>(a.walk.units) + kPerBlock - 1) / kPerBlock;
            launch(context, map_elements<width.value, T, kInputs, Function>, grid_x(blocks), kElementThreads, 0, a,
                   function);
        };
        vectors ? run(std::integral_constant<int, kWidth<T>>{}) : run(std::integral_constant<int, 1>{});
    });
}

} // namespace infini::cuda
