// The number of rows of x up to which a CUDA kernel streams dense weights (weight_stream.cuh) instead of calling
// cuBLAS. With more rows the tensor cores would limit half types, the multiply-adds float32; not measured.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infini::weight_stream {

constexpr int64_t streamed_rows(size_t element_bytes) {
    return element_bytes == 2 ? 16 : 4;
}

} // namespace infini::weight_stream
