// Lines: the elements along the last dimension of tensors of any strides, for kernels that reduce along it. Two ways to
// share the work, the same order of additions: RowLine, threads side by side hold a line (RowPart); ColumnLine, threads
// side by side have lines of their own: for lines whose elements lie further apart than neighbouring lines do.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace infini::cuda {

template <int kTensors> struct Lines {
    Rows<kTensors> rows;
    int64_t n;
    int64_t steps[kTensors]; // from element to element
    int warps;               // that share a line as a row
    bool whole;              // vectors fit all tensors
    bool columns;            // ColumnLine

    // All views have the shape of views[0], the one that is read, apart from the last dimension; `width`: its kWidth.
    Lines(const TensorView *const (&views)[kTensors], int width)
        : rows(views), n(views[0]->size(-1)), warps(RowPlan(1, n, width).threads / kWarp), whole(true) {
        for (int t = 0; t < kTensors; ++t) {
            const int64_t size = views[t]->size(-1);
            steps[t] = size > 1 ? views[t]->stride(-1) : 1;
            whole = whole && steps[t] == 1 && vectors_fit(*views[t]);
        }
        columns = rows.ndim > 0 && distance(rows.strides[0][rows.ndim - 1]) < distance(steps[0]);
    }

private:
    static int64_t distance(int64_t stride) { return stride < 0 ? -stride : stride; }
};

// What both kinds of line offer, to all threads of a block together, those without a line (n = 0) too:
//   reduce<Join>(start, body): body(result, i, count, values) for each vector, as RowPart::visit, result the thread's
//       part; returns all parts joined. Elements beyond the end read as 0.
//   reduce_and_keep<Join>(start, body): the same; where kKeeps, what body wrote to values is what is visited next.
//   visit(body): body(i, count, values).
//   whole(i): whether the vector from i on may be accessed as one, in every tensor.
//   kShared: how many C of shared memory the constructor wants.
template <typename T, int kVectors, typename Kept = T> class RowLine {
public:
    using C = Compute<T>;
    static constexpr int kMaxThreads = 512, kShared = 32;
    static constexpr bool kKeeps = kVectors > 0;

    template <int kTensors>
    __device__ __forceinline__ RowLine(const T *line, int64_t n, const Lines<kTensors> &lines, C *shared)
        : part_(line, n, lines.whole, T{}, lines.steps[0]), shared_(shared) {}

    // Which line, and which of the threads that share it.
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

// A block has 32 lines side by side and threadIdx.y of them share one: each does what some of RowLine's warps would do,
// lane after lane, in the order in which a warp's pairwise sums join them.
template <typename T> class ColumnLine {
public:
    using C = Compute<T>;
    static constexpr int kMaxThreads = 512, kShared = 32 * kWarp;
    static constexpr bool kKeeps = false;
    static constexpr int kElements = kWidth<T>;

    template <int kTensors>
    __device__ __forceinline__ ColumnLine(const T *line, int64_t n, const Lines<kTensors> &lines, C *shared)
        : line_(line), n_(n), step_(lines.steps[0]), warps_(lines.warps), shared_(shared) {}

    static __device__ __forceinline__ int64_t number() {
        return static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
    }
    static __device__ __forceinline__ int thread() { return threadIdx.y; }
    static __device__ __forceinline__ int threads() { return blockDim.y; }

    template <typename Join, typename Body> __device__ __forceinline__ C reduce(C start, const Body &body) {
        C result = start;
        for (int warp = threadIdx.y; warp < warps_; warp += blockDim.y) {
            C halves[5]; // of pairs of 1, 2, 4, 8 and 16 lanes the first
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
                        result = Join::join(halves[level], result);
                    } else if (pairs) {
                        halves[level] = result;
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
        load(values, line_ + i * step_, false, count, step_);
        body(i, count, values);
    }

    const T *const line_;
    const int64_t n_, step_;
    const int warps_;
    C *const shared_;
};

template <typename Type> struct Tag {
    using type = Type;
};

// On the host: calls body(Tag<Line>{}, grid, block) with the kind of line and the launch that serve these lines.
template <typename T, typename Kept = T, int kTensors, typename Body>
void with_line(const Lines<kTensors> &lines, const Body &body) {
    if (lines.columns) {
        return body(Tag<ColumnLine<T>>{}, dim3(grid_x((lines.rows.count + kWarp - 1) / kWarp)),
                    dim3(kWarp, static_cast<unsigned>(lines.warps < 16 ? lines.warps : 16)));
    }
    const RowPlan plan(lines.rows.count, lines.n, kWidth<T>);
    with_vectors(plan.vectors, [&](auto vectors) {
        body(Tag<RowLine<T, vectors.value, Kept>>{}, dim3(grid_x(plan.blocks)), plan.block());
    });
}

} // namespace infini::cuda
