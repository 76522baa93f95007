// The CPU kernel of embedding: one memcpy a row; the ids have been checked.
// Limit: memory bandwidth, each row read once and written once.
#include "embedding.h"
#include "parallel.h"
#include "rows.h"

#include <cstring>

namespace infini::INFINI_LEVEL {
namespace {

template <typename Id> void copy_rows(const embedding::Args &a) {
    // The ids, with a last dimension of stride 0: one for each element of the output, so both walk the same rows.
    TensorView ids = a.ids;
    ids.shape[ids.ndim] = a.out.size(-1);
    ids.strides[ids.ndim++] = 0;
    const TensorView *const views[] = {&a.out, &ids};
    const Rows<2> rows(views);
    const auto size = static_cast<int64_t>(size_of(a.weight.dtype));
    const int64_t bytes = a.out.size(-1) * size, stride = a.weight.stride(0) * size;
    const auto *weight = a.weight.as<const char>();
    auto *out = a.out.as<char>();
    parallel_for(rows.count(), 2 * rows.count() * bytes, [&](int64_t begin, int64_t end) {
        rows.visit(begin, end, [&](const int64_t *at) {
            const int64_t id = ids.as<const Id>()[at[1]];
            std::memcpy(out + at[0] * size, weight + id * stride, static_cast<size_t>(bytes));
        });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::embedding::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (args.ids.dtype == INFINI_DTYPE_I64) {
        copy_rows<int64_t>(args);
    } else {
        copy_rows<int32_t>(args);
    }
}
