// The kernels on tensor cores by head size, for the files that compile them.
#pragma once

#include "decode_kernel.cuh"
#include "prefill_kernel.cuh"

namespace infini::attention::nvidia {

template <typename T, typename E, int kSize> Kernels<T, E> tensor_core_kernels_of_size() {
    using Few = DecodeShape<E, kSize, 1>;
    using More = DecodeShape<E, kSize, 2>;
    using Many = PrefillShape<E, kSize>;
    static_assert(More::kRows >= kSplitRowsOfMany);
    return {{attend_few_rows<T, E, kSize, 1>, Few::kRows, Few::kShared},
            {attend_few_rows<T, E, kSize, 2>, More::kRows, More::kShared},
            {attend_many_rows<T, E, kSize, false>, Many::kRows, Many::kShared},
            {attend_many_rows<T, E, kSize, true>, Many::kRows, Many::kShared},
            1};
}

template <typename T, typename E> Kernels<T, E> tensor_core_kernels_of(int64_t size) {
    return size <= 64    ? tensor_core_kernels_of_size<T, E, 64>()
           : size <= 128 ? tensor_core_kernels_of_size<T, E, 128>()
                         : tensor_core_kernels_of_size<T, E, 256>();
}

} // namespace infini::attention::nvidia
