// The kernels that attention.cu chooses from. Those on tensor cores are compiled in files of their own, a half type
// each, which takes half as long.
#pragma once

#include "problem.cuh"

namespace infini::attention::nvidia {

template <typename T, typename E = T> using Kernel = void (*)(Problem<T, E>);

template <typename T, typename E = T> struct Kernels {
    Kernel<T, E> few, many, exact; // for rows that one tile of `few` holds; for more; for more, without rounding inside
    int few_rows, many_rows;       // of a tile
    size_t few_shared, many_shared; // bytes
    int64_t column_blocks;          // that share the columns of a row
};

// For a head size of at most 256.
template <typename T> Kernels<T> tensor_core_kernels(int64_t size);
template <> Kernels<bf16> tensor_core_kernels(int64_t size);
template <> Kernels<f16> tensor_core_kernels(int64_t size);

} // namespace infini::attention::nvidia
