// Which products go to a library: the table of thresholds, and their overrides.
#include "library.h"

#include <array>
#include <atomic>

#include "check.h"
#include "cpu_capability.h"

namespace infini::gemm {

namespace {

constexpr int kTypes = 3;
constexpr int kProducts = static_cast<int>(Products::kCount);

// The range of rows in which the library is faster. Products without an entry never use the library.
struct Entry {
    Products products;
    infiniDtype_t dtype;
    int level;
    int64_t from, below = kNever;
};

#if defined(__x86_64__)
constexpr int kAvx512Amx = kCpuCapabilities;

// Thresholds: sizes from which ATen took less than 0.97 of our kernel's time, with one thread, 2048 -> 2816 and the
// images of `tune`.
// avx512_amx: an Intel Xeon (Sapphire Rapids). ATen's time as a share of ours from these sizes on: float32 and float16
// products 0.71 to 0.96; conv in float32 0.26 to 0.95; conv in bfloat16 0.24 to 0.84 for few channels (from 256
// channels on, ours takes 0.2 to 0.86 of ATen's time); 32 products of 512 x 64 by 64 x 512 in bfloat16 0.39
// (benchmarks/run.py, which has no other batch). float32 and float16 batches are assumed to be like single products.
// avx512_bf16: Zen 4. Our conv of 64 channels, 3 x 3, took 1.4 times torch's time.
constexpr Entry kTable[] = {
    {Products::kLinear, INFINI_DTYPE_F32, kAvx512Amx, 256},      //
    {Products::kLinear, INFINI_DTYPE_F16, kAvx512Amx, 64},       //
    {Products::kMatmul, INFINI_DTYPE_F32, kAvx512Amx, 8},        //
    {Products::kMatmul, INFINI_DTYPE_F16, kAvx512Amx, 64},       //
    {Products::kBatched, INFINI_DTYPE_F32, kAvx512Amx, 8},       //
    {Products::kBatched, INFINI_DTYPE_F16, kAvx512Amx, 64},      //
    {Products::kBatched, INFINI_DTYPE_BF16, kAvx512Amx, 512},    //
    {Products::kConv, INFINI_DTYPE_F32, kAvx512Amx, 1},          //
    {Products::kConv, INFINI_DTYPE_BF16, kAvx512Amx, 1, 128},    //
    {Products::kConv, INFINI_DTYPE_BF16, kAvx512Bf16, 32},       //
    {Products::kPatches, INFINI_DTYPE_F32, kAvx512Amx, 1},       //
    {Products::kPatches, INFINI_DTYPE_BF16, kAvx512Amx, 1, 128}, //
};
#else
constexpr std::array<Entry, 0> kTable{}; // AArch64: not measured yet
#endif

std::array<std::array<std::atomic<int64_t>, kTypes>, kProducts> chosen{}; // overrides; 0: use the table

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

Entry built_in(Products products, infiniDtype_t dtype) {
    const int level = cpu_tiles() != Tiles::kNone ? kCpuCapabilities : cpu_capability();
    for (const Entry &entry : kTable) {
        if (entry.products == products && entry.dtype == dtype && entry.level == level) {
            return entry;
        }
    }
    return {products, dtype, level, kNever};
}

} // namespace

int64_t library_from(Products products, infiniDtype_t dtype) {
    const auto row = static_cast<size_t>(products);
    const auto type = static_cast<size_t>(index_of(dtype));
    const int64_t set = chosen[row][type].load(std::memory_order_relaxed);
    return set != 0 ? set : built_in(products, dtype).from;
}

int64_t library_below(Products products, infiniDtype_t dtype) {
    const auto row = static_cast<size_t>(products);
    const auto type = static_cast<size_t>(index_of(dtype));
    return chosen[row][type].load(std::memory_order_relaxed) != 0 ? kNever : built_in(products, dtype).below;
}

void set_library_from(Products products, infiniDtype_t dtype, int64_t size) {
    if (size < 0) {
        throw Error(INFINI_STATUS_BAD_PARAM, message("infini: the size must be at least 0, got ", size));
    }
    chosen[static_cast<size_t>(products)][static_cast<size_t>(index_of(dtype))].store(size, std::memory_order_relaxed);
}

bool library_takes(const ExecutionContext &context, Products products, const Args &args) {
    if (context.library == nullptr || args.alpha != 1 || args.beta != 0) {
        return false;
    }
    const int64_t rows = args.c.size(-2), columns = args.c.size(-1), k = args.a.size(-1);
    const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(k);
    return work >= kMinProducts && library_takes_size(products, args.c.dtype, rows < columns ? rows : columns);
}

void multiply_by_library(const ExecutionContext &context, const Args &args, const TensorView &bias) {
    context.library(args, bias);
}

} // namespace infini::gemm
