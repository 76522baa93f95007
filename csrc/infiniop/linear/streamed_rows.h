// Up to how many rows of x a CUDA kernel streams dense weights (weight_stream.cuh) instead of calling cuBLAS. With
// more, half types would be bound by the tensor cores, float32 by the multiply-adds; not measured.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infini::weight_stream {

constexpr int64_t streamed_rows(size_t element_bytes) {
    return element_bytes == 2 ? 16 : 4;
}

} // namespace infini::weight_stream
