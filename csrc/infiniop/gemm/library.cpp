// Which products are a library's: the table, and what was set instead.
#include "library.h"

#include <array>
#include <atomic>

#include "check.h"
#include "cpu_capability.h"

namespace infini::gemm {

namespace {

constexpr int kTypes = 3;
constexpr int kProducts = static_cast<int>(Products::kCount);

// From how many rows on the library is faster; where nothing stands here, it never is.
struct Entry {
    Products products;
    infiniDtype_t dtype;
    int level;
    int64_t from;
};

#if defined(__x86_64__)
constexpr int kAvx512Amx = kCpuCapabilities;

// avx512_amx: an Intel Xeon (Sapphire Rapids), one thread. In float32 torch took 0.78 of our time in one case of linear;
//   that it was the one of 512 rows is assumed. conv took 1.4 times torch's time in float32 and 2.6 to 5.6 times in
//   bfloat16, before its products were in tiles. linear in bfloat16 (oneDNN in tile registers took 0.10 to 0.64 of what our
//   AVX-512 kernels did from 16 rows on) was not compared with our tile kernels yet.
// avx512_bf16: Zen 4, one thread: conv of 64 channels, 3 x 3, took 1.4 times torch's time.
constexpr Entry kTable[] = {
    {Products::kLinear, INFINI_DTYPE_F32, kAvx512Amx, 512}, //
    {Products::kConv, INFINI_DTYPE_F32, kAvx512Amx, 1},     //
    {Products::kConv, INFINI_DTYPE_BF16, kAvx512Amx, 1},    //
    {Products::kConv, INFINI_DTYPE_BF16, kAvx512Bf16, 32},  //
    {Products::kPatches, INFINI_DTYPE_F32, kAvx512Amx, 1},  //
    {Products::kPatches, INFINI_DTYPE_BF16, kAvx512Amx, 1},
};
#else
constexpr std::array<Entry, 0> kTable{}; // AArch64: not compared yet
#endif

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

int64_t built_in(Products products, infiniDtype_t dtype) {
    const int level = cpu_tiles() != Tiles::kNone ? kCpuCapabilities : cpu_capability();
    for (const Entry &entry : kTable) {
        if (entry.products == products && entry.dtype == dtype && entry.level == level) {
            return entry.from;
        }
    }
    return kNever;
}

} // namespace

void set_library(Library offered) {
    library.store(offered, std::memory_order_release);
}

int64_t library_from(Products products, infiniDtype_t dtype) {
    const auto row = static_cast<size_t>(products);
    const auto type = static_cast<size_t>(index_of(dtype));
    const int64_t set = chosen[row][type].load(std::memory_order_relaxed);
    return set != 0 ? set : built_in(products, dtype);
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
