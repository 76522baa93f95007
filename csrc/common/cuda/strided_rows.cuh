// Reductions along the last dimension of tensors with any strides. There are two assignments of threads, which add in
// the same order: RowReducer, where the threads of a warp share a row (RowPart), and ColumnReducer, where each thread
// has its own row, for rows that are adjacent in memory while their elements are not.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace infini::cuda {

template <int kTensors> struct StridedRows {
    RowStrides<kTensors> starts;
    int64_t n;
    int64_t steps[kTensors]; // strides of the last dimension
    int warps;               // warps that share a row in RowReducer
    bool whole;              // all tensors allow vector accesses
    bool columns;            // use ColumnReducer

    // All views have the shape of views[0], the input, apart from the last dimension; `width` is the input's kWidth.
    StridedRows(const TensorView *const (&views)[kTensors], int width)
        : starts(views), n(views[0]->size(-1)), warps(RowPlan(1, n, width).threads / kWarp), whole(true) {
        for (int t = 0; t < kTensors; ++t) {
            const int64_t size = views[t]->size(-1);
            steps[t] = size > 1 ? views[t]->stride(-1) : 1;
            whole = whole && steps[t] == 1 && vectors_fit(*views[t]);
        }
        columns = starts.ndim > 0 && distance(starts.strides[0][starts.ndim - 1]) < distance(steps[0]);
    }

private:
    static int64_t distance(int64_t stride) { return stride < 0 ? -stride : stride; }
};

// The interface of both reducers. All threads of a block must call them, also those without a row (n = 0):
//   reduce<Join>(start, body): calls body(result, i, count, values) for each vector, as RowPart::visit, where result is
//       the thread's partial result; returns the joined results of all threads. Elements beyond the end read as 0.
//   reduce_and_keep<Join>(start, body): the same; if kKeeps, later visits get the values that body wrote.
//   visit(body): calls body(i, count, values).
//   whole(i): whether the vector at i may be loaded in one access from every tensor.
//   kShared: how many C of shared memory the constructor needs.
template <typename T, int kVectors, typename Kept = T> class RowReducer {
public:
    using C = Compute<T>;
    static constexpr int kMaxThreads = 512, kShared = 32;
    static constexpr bool kKeeps = kVectors > 0;

    template <int kTensors>
    __device__ __forceinline__ RowReducer(const T *row, int64_t n, const StridedRows<kTensors> &rows, C *shared)
        : part_(row, n, rows.whole, T{}, rows.steps[0]), shared_(shared) {}

    // The row's index in the block, and the thread's among those that share the row.
    static __device__ __forceinline__ int64_t number() {
        return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    }
    static __device__ __forceinline__ int thread() { return threadIdx.x; }
    static __device__ __forceinline__ int threads() { return blockDim.x; }

    template <typename Join, typename Body> __device__ __forceinline__ C reduce(C start, const Body &body) {
        part_.visit([&](int64_t i, int count, auto &values) { body(start, i, count, values); });
        return row_reduce<Join>(start, shared_);
    }
    template <typename Join, typename Body> __device__ __forceinline__ C reduce_and_keep(C start, const Body &body) {
        part_.update([&](int64_t i, int count, auto &values) { body(start, i, count, values); });
        return row_reduce<Join>(start, shared_);
    }
    template <typename Body> __device__ __forceinline__ void visit(const Body &body) { part_.visit(body); }
    __device__ __forceinline__ bool whole(int64_t i) const { return part_.whole(i); }

private:
    RowPart<T, kVectors, Kept> part_;
    C *const shared_;
};

// A block has 32 adjacent rows; blockDim.y threads share a row. Each thread computes the sums of some of RowReducer's
// warps, lane by lane, in the order in which a warp's pairwise reduction adds them.
template <typename T> class ColumnReducer {
public:
    using C = Compute<T>;
    static constexpr int kMaxThreads = 512, kShared = 32 * kWarp;
    static constexpr bool kKeeps = false;
    static constexpr int kElements = kWidth<T>;

    template <int kTensors>
    __device__ __forceinline__ ColumnReducer(const T *row, int64_t n, const StridedRows<kTensors> &rows, C *shared)
        : row_(row), n_(n), step_(rows.steps[0]), warps_(rows.warps), shared_(shared) {}

    static __device__ __forceinline__ int64_t number() {
        return static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
    }
    static __device__ __forceinline__ int thread() { return threadIdx.y; }
    static __device__ __forceinline__ int threads() { return blockDim.y; }

    template <typename Join, typename Body> __device__ __forceinline__ C reduce(C start, const Body &body) {
        C result = start;
        for (int warp = threadIdx.y; warp < warps_; warp += blockDim.y) {
            C firsts[5]; // the pending left operand of each pair of 1, 2, 4, 8 and 16 lanes
            for (unsigned turn = 0; turn < kWarp; ++turn) {
                const int lane = static_cast<int>(__brev(turn) >> 27);
                result = start;
                const int64_t stride = static_cast<int64_t>(warps_) * kWarp * kElements;
                for (int64_t i = static_cast<int64_t>(warp * kWarp + lane) * kElements; i < n_; i += stride) {
                    visit_one(i, [&](int64_t, int count, auto &values) { body(result, i, count, values); });
                }
                bool pairs = true;
#pragma unroll
                for (int level = 0; level < 5; ++level) {
                    if (pairs && (turn >> level & 1) != 0) {
                        result = Join::join(firsts[level], result);
                    } else if (pairs) {
                        firsts[level] = result;
                        pairs = false;
                    }
                }
            }
            shared_[warp * kWarp + threadIdx.x] = result;
        }
        if (warps_ > 1) {
            __syncthreads();
            result = shared_[threadIdx.x];
            for (int warp = 1; warp < warps_; ++warp) {
                result = Join::join(result, shared_[warp * kWarp + threadIdx.x]);
            }
            __syncthreads(); // `shared` may be written again
        }
        return result;
    }
    template <typename Join, typename Body> __device__ __forceinline__ C reduce_and_keep(C start, const Body &body) {
        return reduce<Join>(start, body);
    }
    template <typename Body> __device__ __forceinline__ void visit(const Body &body) {
        for (int64_t i = threadIdx.y * kElements; i < n_; i += blockDim.y * kElements) {
            visit_one(i, body);
        }
    }
    __device__ __forceinline__ bool whole(int64_t) const { return false; }

private:
    template <typename Body> __device__ __forceinline__ void visit_one(int64_t i, const Body &body) {
        const int count = static_cast<int>(n_ - i < kElements ? n_ - i : kElements);
        C values[kElements];
        load(values, row_ + i * step_, false, count, step_);
        body(i, count, values);
    }

    const T *const row_;
    const int64_t n_, step_;
    const int warps_;
    C *const shared_;
};

template <typename Type> struct Tag {
    using type = Type;
};

// On the host: calls body(Tag<Reducer>{}, grid, block) with the reducer and the launch configuration for these rows.
template <typename T, typename Kept = T, int kTensors, typename Body>
void with_reducer(const StridedRows<kTensors> &rows, const Body &body) {
    if (rows.columns) {
        return body(Tag<ColumnReducer<T>>{}, dim3(grid_x((rows.starts.count + kWarp - 1) / kWarp)),
                    dim3(kWarp, static_cast<unsigned>(rows.warps < 16 ? rows.warps : 16)));
    }
    const RowPlan plan(rows.starts.count, rows.n, kWidth<T>);
    with_vectors(plan.vectors, [&](auto vectors) {
        body(Tag<RowReducer<T, vectors.value, Kept>>{}, dim3(grid_x(plan.blocks)), plan.block());
    });
}

} // namespace infini::cuda
