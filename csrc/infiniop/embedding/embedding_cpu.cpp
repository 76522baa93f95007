// The CPU kernel of embedding: one row after another, by memcpy or streamed. The ids have been checked. Limit: memory
// bandwidth, each row read once and written once.
#include "embedding.h"
#include "level_types.h"
#include "parallel.h"
#include "row_iterator.h"
#include "streaming_stores.h"

#include <cstring>

namespace infini::INFINI_LEVEL {
namespace {

// Copies a row as vectors of floats with streaming stores, bit for bit. Prefetches the next row, whose address the
// hardware cannot predict.
void stream_row(char *out, const char *row, int64_t bytes, const char *next) {
    constexpr int64_t kStep = sizeof(VecF);
    int64_t i = 0;
    for (; i + kStep <= bytes; i += kStep) {
        __builtin_prefetch(next + i);
        stream(reinterpret_cast<float *>(out + i), load(reinterpret_cast<const float *>(row + i)));
    }
    std::memcpy(out + i, row + i, static_cast<size_t>(bytes - i));
}

template <typename Id> void copy_rows(const embedding::Args &a) {
    // ids gets a last dimension of stride 0, so that ids and out have the same rows.
    TensorView ids = a.ids;
    ids.shape[ids.ndim] = a.out.size(-1);
    ids.strides[ids.ndim++] = 0;
    const TensorView *const views[] = {&a.out, &ids};
    const RowIterator<2> rows(views);
    const auto size = static_cast<int64_t>(size_of(a.weight.dtype));
    const int64_t bytes = a.out.size(-1) * size, stride = a.weight.stride(0) * size;
    const auto *weight = a.weight.as<const char>();
    auto *out = a.out.as<char>();
    const bool large = worth_streaming(a.out.data, rows.count() * bytes);
    parallel_for(rows.count(), 2 * rows.count() * bytes, [&](int64_t begin, int64_t end) {
        // A row is copied when the next row's address is known.
        char *to = nullptr;
        const char *from = nullptr; // nullptr: zeros
        const auto copy = [&](const char *next) {
            if (from == nullptr) {
                std::memset(to, 0, static_cast<size_t>(bytes));
            } else if (large && stream_aligned(reinterpret_cast<const float *>(to))) {
                stream_row(to, from, bytes, next);
            } else {
                std::memcpy(to, from, static_cast<size_t>(bytes));
            }
        };
        rows.visit(begin, end, [&](const int64_t *at) {
            const int64_t id = ids.as<const Id>()[at[1]] - a.first;
            const char *row = id >= 0 && id < a.weight.size(0) ? weight + id * stride : nullptr;
            if (to != nullptr) {
                copy(row != nullptr ? row : from);
            }
            to = out + at[0] * size;
            from = row;
        });
        copy(from);
        stream_fence();
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::embedding::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (kOnlyBf16) { // bf16's level would compile the same code
        return INFINI_FLOAT_LEVEL::cpu_kernel(args);
    }
    if (args.ids.dtype == INFINI_DTYPE_I64) {
        copy_rows<int64_t>(args);
    } else {
        copy_rows<int32_t>(args);
    }
}
