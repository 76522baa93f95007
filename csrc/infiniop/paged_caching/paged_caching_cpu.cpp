// The CPU kernel of paged_caching: one row of a head at a time, as bytes or quantized. The slots have been checked.
// Limit: memory bandwidth, each element read and written once. Threads split the heads, so that tokens with equal slots
// are written in order.
#include "indices.h"
#include "paged_caching.h"
#include "parallel.h"
#include "quantize_row.h"

#include <cstring>

#include "dtype.h"

namespace infini::INFINI_LEVEL {
namespace {

// Writes the rows of one head for all tokens.
void write_head(const TensorView &cache, const TensorView &rows, const TensorView &slots, int64_t head) {
    const auto element = static_cast<int64_t>(size_of(rows.dtype));
    const auto bytes = static_cast<size_t>(rows.shape[2] * element);
    for (int64_t t = 0; t < rows.shape[0]; ++t) {
        const int64_t slot = Indices(slots)[t];
        if (slot >= 0) {
            const int64_t from = t * rows.strides[0] + head * rows.strides[1];
            std::memcpy(cache.as<char>() + paged_caching::row_of(cache, slot, head) * element,
                        rows.as<const char>() + from * element, bytes);
        }
    }
}

// The same for an int8 cache.
template <typename T>
void quantize_head(const TensorView &cache, const TensorView &scales, const TensorView &rows, const TensorView &slots,
                   int64_t head) {
    for (int64_t t = 0; t < rows.shape[0]; ++t) {
        const int64_t slot = Indices(slots)[t];
        if (slot >= 0) {
            *paged_caching::scale_of(scales, slot, head) =
                quantize_row(rows.as<const T>() + t * rows.strides[0] + head * rows.strides[1], rows.shape[2],
                             cache.as<int8_t>() + paged_caching::row_of(cache, slot, head));
        }
    }
}

void write_head(const TensorView &cache, const TensorView &scales, const TensorView &rows, const TensorView &slots,
                int64_t head) {
    if (scales.dtype) {
        with_float_type(rows.dtype, [&](auto x) { quantize_head<decltype(x)>(cache, scales, rows, slots, head); });
    } else {
        write_head(cache, rows, slots, head);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::paged_caching::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const int64_t heads = args.k.shape[1];
    const int64_t bytes = 4 * args.k.numel() * static_cast<int64_t>(size_of(args.k.dtype));
    parallel_for(2 * heads, bytes, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            if (i < heads) {
                write_head(args.k_cache, args.k_scales, args.k, args.slot_mapping, i);
            } else {
                write_head(args.v_cache, args.v_scales, args.v, args.slot_mapping, i - heads);
            }
        }
    });
}
