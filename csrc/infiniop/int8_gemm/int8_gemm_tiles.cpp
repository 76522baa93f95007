// The kernel of int8_gemm in tile registers, for column-major weights: int8_tiles.h.
#include "int8_tiles.h"
#include "int8_gemm.h"
#include "int8_epilogue.h"

void infini::int8_gemm::INFINI_LEVEL::tile_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const TensorView &x = args.x, &w = args.weights;
    multiply_bytes(
        x.size(0), w.size(1), x.size(1), w.as<const int8_t>(), w.stride(1),
        [&](int64_t row, char *) { return x.as<const int8_t>() + row * x.stride(0); }, Int8Epilogue{args, 0});
}
