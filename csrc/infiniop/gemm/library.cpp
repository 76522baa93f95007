// Which products are a library's: the table, and what was set instead.
#include "library.h"

#include <array>
#include <atomic>

#include "check.h"
#include "cpu_capability.h"

namespace infini::gemm {

namespace {

constexpr int kTypes = 3, kLevels = kCpuCapabilities + 1;
constexpr int kProducts = static_cast<int>(Products::kCount);

// From how many rows on the library is faster, by level: baseline, avx2, avx512, avx512_bf16, avx512_amx.
//   avx512_amx, float32: an Intel Xeon (Sapphire Rapids), one thread: torch took 0.78 of our time in one case of linear;
//   that it was the one of 512 rows is assumed.
//   Its bfloat16 (oneDNN in tile registers, 0.10 to 0.64 of what our AVX-512 kernels took from 16 rows on) was not
//   compared with our tile kernels yet.
// AArch64 (neon, neon_dotprod, neon_bf16, the emulated avx512_amx): not compared yet.
#if defined(__aarch64__)
constexpr int64_t kTable[kProducts][kTypes][kLevels] = {
    {
        {kNever, kNever, kNever, kNever}, // linear, float32
        {kNever, kNever, kNever, kNever}, // bfloat16
        {kNever, kNever, kNever, kNever}, // float16
    },
    {
        {kNever, kNever, kNever, kNever}, // matmul, float32
        {kNever, kNever, kNever, kNever}, // bfloat16
        {kNever, kNever, kNever, kNever}, // float16
    },
};
#else
constexpr int64_t kTable[kProducts][kTypes][kLevels] = {
    {
        {kNever, kNever, kNever, kNever, 512},    // linear, float32
        {kNever, kNever, kNever, kNever, kNever}, // bfloat16
        {kNever, kNever, kNever, kNever, kNever}, // float16
    },
    {
        {kNever, kNever, kNever, kNever, kNever}, // matmul, float32
        {kNever, kNever, kNever, kNever, kNever}, // bfloat16
        {kNever, kNever, kNever, kNever, kNever}, // float16
    },
};
#endif

// Multiply-adds from which on a call of a library (some microseconds) can pay.
constexpr double kLeastProducts = 1 << 20;

std::atomic<Library> library{nullptr};
std::array<std::array<std::atomic<int64_t>, kTypes>, kProducts> chosen{}; // 0: as the table says

int index_of(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_F32:
        return 0;
    case INFINI_DTYPE_BF16:
        return 1;
    case INFINI_DTYPE_F16:
        return 2;
    default:
        throw Error(INFINI_STATUS_BAD_TENSOR_DTYPE,
                    message("infini: products are of float32, bfloat16 or float16, got ", name_of(dtype)));
    }
}

} // namespace

void set_library(Library offered) {
    library.store(offered, std::memory_order_release);
}

int64_t library_from(Products products, infiniDtype_t dtype) {
    const auto row = static_cast<size_t>(products);
    const auto type = static_cast<size_t>(index_of(dtype));
    const int64_t set = chosen[row][type].load(std::memory_order_relaxed);
    return set != 0 ? set : kTable[row][type][cpu_tiles() != Tiles::kNone ? kCpuCapabilities : cpu_capability()];
}

void set_library_from(Products products, infiniDtype_t dtype, int64_t size) {
    if (size < 0) {
        throw Error(INFINI_STATUS_BAD_PARAM, message("infini: the size must be at least 0, got ", size));
    }
    chosen[static_cast<size_t>(products)][static_cast<size_t>(index_of(dtype))].store(size, std::memory_order_relaxed);
}

bool library_takes(Products products, const Args &args) {
    if (library.load(std::memory_order_acquire) == nullptr || args.alpha != 1 || args.beta != 0) {
        return false;
    }
    const int64_t rows = args.c.size(-2), columns = args.c.size(-1), k = args.a.size(-1);
    const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(k);
    return work >= kLeastProducts && (rows < columns ? rows : columns) >= library_from(products, args.c.dtype);
}

void multiply_by_library(const Args &args, const TensorView &bias) {
    library.load(std::memory_order_acquire)(args, bias);
}

} // namespace infini::gemm
