// The CUDA kernel of embedding: the threads that share a row copy it in vectors of 16 bytes, with four independent ones
// in flight per thread. Limit: memory bandwidth, each row read once and written once. Ids out of range give rows of
// NaN, ids of another rank's shard rows of zeros.
// SASS: copy_rows: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/packed32.cuh"
#include "embedding.h"

namespace infini::embedding {
namespace {

constexpr int kLoads = 4;

// Bits: an unsigned integer of the size of weight's elements.
template <typename Bits, typename Id> struct Copy {
    Bits *out;
    const Id *ids;
    const Bits *weight;
    int64_t rows_of_weight, first, total, stride, n;
    cuda::RowStrides<2> rows; // out, ids
    bool whole;               // vector accesses are possible
};

template <typename Bits, typename Id> __global__ void copy_rows(const __grid_constant__ Copy<Bits, Id> a) {
    cuda::grid_dependency_sync();
    constexpr int kElements = cuda::kWidth<Bits>;
    constexpr Bits kNan = static_cast<Bits>(-1); // all bits set is NaN in float and in both half types
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.rows.count) {
        return;
    }
    int64_t at[2];
    a.rows.locate(row, at);
    const int64_t id = a.ids[at[1]];
    const bool good = id >= a.first && id - a.first < a.rows_of_weight;
    const Bits other = id >= 0 && id < a.total ? 0 : kNan; // the bits of a row that weight does not hold
    const Bits *from = a.weight + (good ? (id - a.first) * a.stride : 0);
    Bits *to = a.out + at[0];
    const int64_t step = static_cast<int64_t>(blockDim.x) * kElements;
    for (int64_t begin = static_cast<int64_t>(threadIdx.x) * kElements; begin < a.n; begin += kLoads * step) {
        cuda::Packed32<Bits, kElements> vectors[kLoads];
        const auto left = [&](int v) { // elements of vector v
            const int64_t rest = a.n - (begin + v * step);
            return static_cast<int>(rest < 0 ? 0 : rest < kElements ? rest : kElements);
        };
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
            const int count = good ? left(v) : 0;
            vectors[v] = cuda::load_packed32<Bits, kElements>(from + begin + v * step, a.whole && count == kElements,
                                                              count, other);
        }
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
            const auto vector = cuda::bit_cast<cuda::Vector<Bits>>(vectors[v]);
            cuda::store_packed32(to + begin + v * step, vector, a.whole && left(v) == kElements, left(v));
        }
    }
}

template <typename Bits, typename Id> void copy(const ExecutionContext &context, const Args &args) {
    // ids gets a last dimension of stride 0, so that ids and out have the same rows.
    TensorView ids = args.ids;
    ids.shape[ids.ndim] = args.out.size(-1);
    ids.strides[ids.ndim++] = 0;
    const TensorView *const views[] = {&args.out, &ids};
    const Copy<Bits, Id> a{args.out.as<Bits>(),
                           args.ids.as<const Id>(),
                           args.weight.as<const Bits>(),
                           args.weight.shape[0],
                           args.first,
                           args.total,
                           args.weight.strides[0],
                           args.out.size(-1),
                           cuda::RowStrides<2>(views),
                           cuda::vectors_fit(args.out, args.weight)};
    const cuda::RowPlan plan(a.rows.count, (a.n + kLoads - 1) / kLoads, cuda::kWidth<Bits>);
    cuda::launch(context, copy_rows<Bits, Id>, cuda::grid_x(plan.blocks), plan.block(), 0, a);
}

template <typename Bits> void copy(const ExecutionContext &context, const Args &args) {
    args.ids.dtype == INFINI_DTYPE_I64 ? copy<Bits, int64_t>(context, args) : copy<Bits, int32_t>(context, args);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    size_of(args.weight.dtype) == 2 ? copy<uint16_t>(context, args) : copy<uint32_t>(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::embedding
