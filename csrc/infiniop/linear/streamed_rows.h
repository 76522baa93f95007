// Up to how many rows of x a CUDA kernel streams dense weights (weight_stream.cuh), where cuBLAS is the other choice.
// Of half types more would wait for the tensor cores, of float32 for the multiply-adds; not measured.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infini::weight_stream {

constexpr int64_t streamed_rows(size_t element_bytes) {
    return element_bytes == 2 ? 16 : 4;
}

} // namespace infini::weight_stream
