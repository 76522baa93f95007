// The kernels that attention.cu chooses from. Those on tensor cores are compiled in separate files, one for each half
// type and type of K and V, because each takes long.
#pragma once

#include "attention_problem.cuh"

namespace infini::attention::nvidia {

template <typename T, typename E> using Kernel = void (*)(Problem<T, E>);

template <typename T, typename E> struct Kernels {
    struct Choice {
        Kernel<T, E> kernel;
        int rows;      // of a tile
        size_t shared; // bytes
    };
    // few, more: for rows that fit in one tile, `more` for up to kSplitRowsOfMany of them; exact: without intermediate
    // rounding.
    Choice few, more, many, exact;
    int64_t column_blocks; // that share the columns of a row
};

// For a head size of at most 256.
template <typename T, typename E> Kernels<T, E> tensor_core_kernels(int64_t size);
template <> Kernels<bf16, bf16> tensor_core_kernels(int64_t size);
template <> Kernels<bf16, int8_t> tensor_core_kernels(int64_t size);
template <> Kernels<f16, f16> tensor_core_kernels(int64_t size);
template <> Kernels<f16, int8_t> tensor_core_kernels(int64_t size);

} // namespace infini::attention::nvidia
