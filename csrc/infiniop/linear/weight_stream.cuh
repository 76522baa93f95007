// Products of rows of x with weights that are read once from memory: y = x @ weight^T, for linear, fused_linear and
// gemm at few rows, and for the quantised formats. Half types and int8 x on the tensor cores, float x by multiply-adds.
//
// A block takes 16 rows of the weight, and its 8 warps share k: stages of 128 bytes a row in turns, copied to shared
// memory some stages ahead. Warps add up in their order. So the order of a sum depends on k alone, and a row of x has
// the same bits beside any others. Within a stage the elements of k go to the tensor cores in an order that spares
// shuffles: a lane multiplies what it has read, and x goes through the same permutation.
// Limit: memory bandwidth of the weight's bytes, 4.3 TB/s on an H200: 33 KB a microsecond for each of 132
// multiprocessors, for which some 23 KB must be under way; two blocks have 96 KB.
#pragma once

#include "cuda/async_copy.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "cuda/mma_int8.h"
#include "cuda/pairs.h"
#include "cuda/reduce.h"
#include "cuda/rows.h"
#include "streamed_rows.h"

namespace infini::weight_stream {

constexpr int kMaxWeights = 3;
constexpr int kBlockRows = 16; // of the weight
constexpr int kWarps = 8, kStages = 4;
constexpr int kStageBytes = 128; // of each row of the weight
constexpr int kSlotBytes = kBlockRows * kStageBytes;
constexpr int kRingBytes = kWarps * kStages * kSlotBytes;
constexpr int kTileRows = 8;   // of x, what the tensor cores take at once
constexpr int kSpanStages = 4; // of each warp, for which the scales of groups are in shared memory

// A vector of floats of any floating dtype.
struct Numbers {
    const void *data = nullptr; // nullptr: there are none
    infiniDtype_t dtype = INFINI_DTYPE_INVALID;
    int64_t stride = 1; // in elements

    Numbers() = default;
    // Of a view of one dimension, or of rows of which `stride` tells how far they lie apart.
    Numbers(const TensorView &view, int64_t stride_)
        : data(view.dtype != INFINI_DTYPE_INVALID ? view.data : nullptr), dtype(view.dtype), stride(stride_) {}

    __device__ __forceinline__ float operator[](int64_t i) const {
        switch (dtype) {
        case INFINI_DTYPE_BF16:
            return cuda::widen(static_cast<const bf16 *>(data)[i]);
        case INFINI_DTYPE_F16:
            return cuda::widen(static_cast<const f16 *>(data)[i]);
        default:
            return static_cast<const float *>(data)[i];
        }
    }
};

struct Weight {
    const unsigned char *data;
    int64_t n;            // rows; their results are columns of y
    int64_t row, element; // how far rows and elements of k (bytes of int4) lie apart, in bytes
    bool whole;           // 16 bytes of a row can be read at once, from any multiple of 16 on
    int64_t first_block, first_column;
    Numbers scales; // one a row, or none
    Numbers bias;

    // weight: [n, elements or bytes of k], any strides.
    static Weight of(const TensorView &weight, int64_t first_block, int64_t first_column) {
        const auto size = static_cast<int64_t>(size_of(weight.dtype));
        const int64_t row = weight.stride(0) * size, element = weight.stride(1) * size;
        const bool dense = weight.size(1) <= 1 || element == size;
        const bool aligned =
            reinterpret_cast<uintptr_t>(weight.data) % 16 == 0 && (row % 16 == 0 || weight.size(0) <= 1);
        return {weight.as<const unsigned char>(),
                weight.size(0),
                row,
                dense ? size : element,
                dense && aligned,
                first_block,
                first_column,
                {},
                {}};
    }
    int64_t blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
};

template <typename X> struct Problem {
    const X *x;
    bool x_whole; // rows of x may be read by vectors
    int64_t m, k;
    cuda::Rows<2> rows; // x, y
    int weights;
    Weight weight[kMaxWeights];
    // Of groups along k, with int4.
    Numbers scales, zeros; // [n, k / group]; the stride is that of rows
    int group_shift;       // groups are of 1 << group_shift elements: 32, 64 or 128
    // y = alpha * sum * row_scales * scales + beta * y + bias.
    void *y;
    infiniDtype_t y_dtype;
    int64_t y_column;   // how far columns lie apart
    Numbers row_scales; // one for each row of x, or none
    float alpha, beta;
    int64_t x_tiles; // blocks that share rows of the weight

    // y and x: the same shape but for the last dimension.
    Problem(const TensorView &y_view, const TensorView &x_view)
        : x(x_view.as<const X>()), x_whole(cuda::vectors_fit(x_view)), m(0), k(x_view.size(-1)),
          rows({&x_view, &y_view}), weights(0), weight{}, group_shift(0), y(y_view.data), y_dtype(y_view.dtype),
          y_column(y_view.size(-1) > 1 ? y_view.stride(-1) : 1), alpha(1), beta(0), x_tiles(1) {
        m = rows.count;
    }
    void add(const TensorView &view) {
        const Weight *const last = weights > 0 ? &weight[weights - 1] : nullptr;
        weight[weights++] = last ? Weight::of(view, last->first_block + last->blocks(), last->first_column + last->n)
                                 : Weight::of(view, 0, 0);
    }
    int64_t blocks() const { return weight[weights - 1].first_block + weight[weights - 1].blocks(); }
};

// Which weight a block has, and which of its rows first.
template <typename X> __device__ __forceinline__ int weight_of(const Problem<X> &a, int64_t block) {
    int i = 0;
    while (i + 1 < a.weights && block >= a.weight[i + 1].first_block) {
        ++i;
    }
    return i;
}

// y of one sum.
template <typename X>
__device__ __forceinline__ void finish(const Problem<X> &a, const Weight &w, int64_t m, int64_t n, float sum) {
    int64_t at[2];
    a.rows.locate(m, at);
    const int64_t to = at[1] + (w.first_column + n) * a.y_column;
    float scale = a.alpha;
    if (a.row_scales.data != nullptr) {
        scale = a.row_scales[m * a.row_scales.stride];
    }
    if (w.scales.data != nullptr) {
        scale *= w.scales[n * w.scales.stride];
    }
    float value = sum * scale;
    if (a.beta != 0) {
        Numbers old;
        old.data = a.y;
        old.dtype = a.y_dtype;
        value += a.beta * old[to];
    }
    if (w.bias.data != nullptr) {
        value += w.bias[n * w.bias.stride];
    }
    switch (a.y_dtype) {
    case INFINI_DTYPE_BF16:
        return cuda::narrow_to(static_cast<bf16 *>(a.y) + to, value);
    case INFINI_DTYPE_F16:
        return cuda::narrow_to(static_cast<f16 *>(a.y) + to, value);
    default:
        static_cast<float *>(a.y)[to] = value;
    }
}

// ---- what a stage holds ----

// 16 bytes of a row of the weight, of which `left` are there.
__device__ __forceinline__ cuda::Vector<uint32_t, 4> read_chunk(const Weight &w, const unsigned char *row,
                                                                int64_t first, int left, int size) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        if (size == 2) {
            if (i < left) {
                const auto value = *reinterpret_cast<const uint16_t *>(row + (first + i) / 2 * w.element);
                words[i / 4] |= static_cast<uint32_t>(value) << i % 4 * 8;
            }
        } else {
#pragma unroll
            for (int j = i; j < i + 2; ++j) {
                words[j / 4] |= j < left ? static_cast<uint32_t>(row[(first + j) * w.element]) << j % 4 * 8 : 0u;
            }
        }
    }
    return {{words[0], words[1], words[2], words[3]}};
}

// Where chunk `chunk` of 16 bytes of a row lies in a slot: such that the reads below meet no bank twice.
__device__ __forceinline__ int place(int row, int chunk) {
    return row * kStageBytes + (chunk ^ ((row & 1) << 2 | (row >> 1 & 3))) * 16;
}

// A warp's copies of stage `stage`.
template <int kElementBytes>
__device__ __forceinline__ void start_stage(const Weight &w, int64_t first_row, int64_t row_bytes, int64_t stage,
                                            unsigned char *slot) {
    const int lane = threadIdx.x, chunk = lane % 8;
    const int64_t byte = stage * kStageBytes + chunk * 16;
    const int there = static_cast<int>(row_bytes - byte < 16 ? (row_bytes > byte ? row_bytes - byte : 0) : 16);
#pragma unroll
    for (int i = 0; i < kBlockRows / 4; ++i) {
        const int row = lane / 8 + 4 * i;
        const int left = first_row + row < w.n ? there : 0;
        const unsigned char *const from = w.data + (left > 0 ? (first_row + row) * w.row : 0);
        unsigned char *const to = slot + place(row, chunk);
        if (w.whole) {
            cuda::async_copy(to, left > 0 ? from + byte : w.data, left);
        } else {
            *reinterpret_cast<cuda::Vector<uint32_t, 4> *>(to) = read_chunk(w, from, byte, left, kElementBytes);
        }
    }
}

// A lane's part of x for one step: kBytes from element `first` on, zeros beyond k.
template <typename X, int kRegisters>
__device__ __forceinline__ void load_x(uint32_t (&out)[kRegisters], const X *row, bool there, int64_t first, int64_t k,
                                       bool whole) {
    constexpr int kElements = kRegisters * 4 / sizeof(X), kPart = kRegisters < 4 ? kRegisters : 4;
    constexpr int kInRegister = 4 / sizeof(X);
    if (there && whole && first + kElements <= k) {
#pragma unroll
        for (int i = 0; i < kRegisters; i += kPart) {
            const auto part = *reinterpret_cast<const cuda::Vector<uint32_t, kPart> *>(row + first + i * kInRegister);
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                out[i + j] = part.values[j];
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
        out[i] = 0;
#pragma unroll
        for (int j = 0; j < kInRegister; ++j) {
            const int64_t at = first + i * kInRegister + j;
            if (there && at < k) {
                uint32_t bits;
                if constexpr (sizeof(X) == 2) {
                    bits = row[at].bits;
                } else {
                    bits = static_cast<uint8_t>(row[at]);
                }
                out[i] |= bits << (j * 8 * static_cast<int>(sizeof(X)));
            }
        }
    }
}

// ---- formats: how the bytes of a stage meet x, in steps; kLane: elements of a step that one lane has ----

// How many rows of x the kernel has at most; the scales of a step's group for the rows that a lane has sums of.
struct GroupScales {
    float scale[2], zero[2];
    bool has_zeros;
};

template <typename Read>
__device__ __forceinline__ Read read_slot(const unsigned char *slot, int row, int chunk, int at) {
    return *reinterpret_cast<const Read *>(slot + place(row, chunk) + at);
}

template <typename T> struct Dense {
    using X = T;
    using Sum = float;
    static constexpr int kElementBytes = 2, kBits = 16, kLane = 8, kXRegisters = 4;
    static constexpr bool kGrouped = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int step, int g, int t,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4],
                                                    const GroupScales &) {
        const auto low = read_slot<cuda::Vector<uint32_t, 4>>(slot, g, 4 * step + t, 0);
        const auto high = read_slot<cuda::Vector<uint32_t, 4>>(slot, g + 8, 4 * step + t, 0);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {low.values[p], high.values[p], low.values[p + 1], high.values[p + 1]};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma<T>(sums[i], a, x[i][p], x[i][p + 1]);
            }
        }
    }
};

// int8 weights, x of a half type: the integers are exact in it.
template <typename T> struct Int8 {
    using X = T;
    using Sum = float;
    static constexpr int kElementBytes = 1, kBits = 8, kLane = 16, kXRegisters = 8;
    static constexpr bool kGrouped = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int step, int g, int t,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4],
                                                    const GroupScales &) {
        const auto low = read_slot<cuda::Vector<uint32_t, 4>>(slot, g, 4 * step + t, 0);
        const auto high = read_slot<cuda::Vector<uint32_t, 4>>(slot, g + 8, 4 * step + t, 0);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const uint32_t a[4] = {cuda::int8_pair<T, 0>(low.values[p]), cuda::int8_pair<T, 0>(high.values[p]),
                                   cuda::int8_pair<T, 2>(low.values[p]), cuda::int8_pair<T, 2>(high.values[p])};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma<T>(sums[i], a, x[i][2 * p], x[i][2 * p + 1]);
            }
        }
    }
};

// int8 weights and int8 x: exact sums.
struct Int8ByInt8 {
    using X = int8_t;
    using Sum = int32_t;
    static constexpr int kElementBytes = 1, kBits = 8, kLane = 16, kXRegisters = 4;
    static constexpr bool kGrouped = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int step, int g, int t,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4],
                                                    const GroupScales &) {
        const auto low = read_slot<cuda::Vector<uint32_t, 4>>(slot, g, 4 * step + t, 0);
        const auto high = read_slot<cuda::Vector<uint32_t, 4>>(slot, g + 8, 4 * step + t, 0);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {low.values[p], high.values[p], low.values[p + 1], high.values[p + 1]};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma(sums[i], a, x[i][p], x[i][p + 1]);
            }
        }
    }
};

// sums += scale * products + zero * x's own sum, for the 32 elements of a step, which lie in one group.
template <typename Part>
__device__ __forceinline__ void add_group(float (&sums)[4], const Part (&products)[4], const Part (&of_x)[4],
                                          const GroupScales &scales) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        sums[e] += scales.scale[e / 2] * static_cast<float>(products[e]);
        if (scales.has_zeros) {
            sums[e] += scales.zero[e / 2] * static_cast<float>(of_x[e]);
        }
    }
}

// int4 weights, x of a half type: q - 8 is exact in it. x's own sums are a product with ones.
template <typename T> struct Int4 {
    using X = T;
    using Sum = float;
    static constexpr int kElementBytes = 1, kBits = 4, kLane = 8, kXRegisters = 4;
    static constexpr bool kGrouped = true;

    // Elements i and i + 4 become pairs, as nibbles do.
    static __device__ __forceinline__ void arrange(uint32_t (&x)[kXRegisters]) {
        const uint32_t a = x[0], b = x[1], c = x[2], d = x[3];
        x[0] = __byte_perm(a, c, 0x5410);
        x[1] = __byte_perm(a, c, 0x7632);
        x[2] = __byte_perm(b, d, 0x5410);
        x[3] = __byte_perm(b, d, 0x7632);
    }

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int step, int g, int t,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4],
                                                    const GroupScales &scales) {
        constexpr uint32_t kOne = std::is_same_v<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
        constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
        const auto low = read_slot<uint32_t>(slot, g, step, 4 * t),
                   high = read_slot<uint32_t>(slot, g + 8, step, 4 * t);
        uint32_t a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                a[half][j] = cuda::int4_pair<T>(j % 2 == 0 ? low : high, 2 * half + j / 2);
            }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) { // the products of a tile go before the next one's: registers are few
            float products[4] = {}, of_x[4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                cuda::mma<T>(products, a[half], x[i][2 * half], x[i][2 * half + 1]);
                if (scales.has_zeros) {
                    cuda::mma<T>(of_x, kOnes, x[i][2 * half], x[i][2 * half + 1]);
                }
            }
            add_group(sums[i], products, of_x, scales);
        }
    }
};

// int4 weights and int8 x: exact sums within 32 elements, of x's own too: (q - 8) x = q x - 8 x.
struct Int4ByInt8 {
    using X = int8_t;
    using Sum = float;
    static constexpr int kElementBytes = 1, kBits = 4, kLane = 8, kXRegisters = 2;
    static constexpr bool kGrouped = true;

    // Even elements, then odd ones, as nibbles.
    static __device__ __forceinline__ void arrange(uint32_t (&x)[kXRegisters]) {
        const uint32_t a = x[0], b = x[1];
        x[0] = __byte_perm(a, b, 0x6420);
        x[1] = __byte_perm(a, b, 0x7531);
    }

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int step, int g, int t,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4],
                                                    const GroupScales &scales) {
        constexpr uint32_t kNibbles = 0x0f0f0f0fu, kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        const auto low = read_slot<uint32_t>(slot, g, step, 4 * t),
                   high = read_slot<uint32_t>(slot, g + 8, step, 4 * t);
        const uint32_t a[4] = {low & kNibbles, high & kNibbles, low >> 4 & kNibbles, high >> 4 & kNibbles};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            int32_t products[4] = {}, of_x[4] = {};
            cuda::mma(products, a, x[i][0], x[i][1]);
            cuda::mma(of_x, kOnes, x[i][0], x[i][1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                products[e] -= 8 * of_x[e];
            }
            add_group(sums[i], products, of_x, scales);
        }
    }
};

// ---- the kernel ----

// The scales and zeros of a block's rows for a span of k, as floats in shared memory.
struct GroupTable {
    float *scales, *zeros; // zeros == nullptr: none
    int pitch;

    // Of `groups` groups from `first` on. By all threads of the block.
    template <typename X>
    __device__ __forceinline__ void fill(const Problem<X> &a, int64_t n, int64_t first_row, int64_t first,
                                         int groups) const {
        const int thread = threadIdx.y * cuda::kWarp + threadIdx.x;
        for (int i = thread; i < groups * kBlockRows; i += kWarps * cuda::kWarp) {
            const int row = i / groups, group = i % groups;
            const bool there = first_row + row < n;
            scales[row * pitch + group] = there ? a.scales[(first_row + row) * a.scales.stride + first + group] : 0.0f;
            if (zeros != nullptr) {
                zeros[row * pitch + group] = there ? a.zeros[(first_row + row) * a.zeros.stride + first + group] : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void read(GroupScales &to, int g, int group) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to.scale[i] = scales[(g + 8 * i) * pitch + group];
            to.zero[i] = zeros != nullptr ? zeros[(g + 8 * i) * pitch + group] : 0.0f;
        }
    }
};

template <typename F> struct Stages {
    static constexpr int kElements = kStageBytes * 8 / F::kBits; // of k, in a stage
    static constexpr int kSteps = kElements / (4 * F::kLane);
    static constexpr int kSpan = kSpanStages * kWarps * kElements; // of k

    static int span_groups(int64_t k, int group_shift) {
        return static_cast<int>((k < kSpan ? k : kSpan) >> group_shift);
    }
    // An odd pitch: no two of 8 rows meet in a bank.
    static __host__ __device__ int pitch(int groups) { return groups | 1; }
};

template <typename F, int kTiles>
__global__ void __launch_bounds__(kWarps *cuda::kWarp, 2)
    stream(const __grid_constant__ Problem<typename F::X> a, int table_groups) {
    cuda::grid_dependency_sync();
    using X = typename F::X;
    using Sum = typename F::Sum;
    using S = Stages<F>;
    constexpr bool kEarly = kTiles * S::kSteps * F::kXRegisters <= 32; // x is in registers before it is needed
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane / 4, t = lane % 4;
    const int64_t block = blockIdx.x / a.x_tiles, first_m = blockIdx.x % a.x_tiles * (kTiles * kTileRows);
    const Weight &w = a.weight[weight_of(a, block)];
    const int64_t first_row = (block - w.first_block) * kBlockRows, row_bytes = a.k * F::kBits / 8;
    auto *const memory = cuda::dynamic_shared<unsigned char>();
    unsigned char *const ring = memory + warp * (kStages * kSlotBytes);

    const X *x[kTiles];
    bool there[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int64_t m = first_m + i * kTileRows + g;
        there[i] = m < a.m;
        int64_t at[2];
        a.rows.locate(there[i] ? m : 0, at);
        x[i] = a.x + at[0];
    }
    const int64_t all = (row_bytes + kStageBytes - 1) / kStageBytes;
    const int64_t mine = all > warp ? (all - warp + kWarps - 1) / kWarps : 0;
    const auto start = [&](int64_t i) {
        if (i < mine) {
            start_stage<F::kElementBytes>(w, first_row, row_bytes, warp + i * kWarps, ring + i % kStages * kSlotBytes);
        }
        cuda::async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        start(i);
    }

    Sum sums[kTiles][4] = {};
    GroupScales scales{};
    GroupTable table{};
    if constexpr (F::kGrouped) {
        table.pitch = S::pitch(table_groups);
        table.scales = reinterpret_cast<float *>(memory + kRingBytes);
        table.zeros = a.zeros.data != nullptr ? table.scales + kBlockRows * table.pitch : nullptr;
        scales.has_zeros = table.zeros != nullptr;
    }
    const auto run = [&](int64_t i, int64_t span) {
        const int64_t first = (warp + i * kWarps) * S::kElements; // element of k
        uint32_t early[kEarly ? S::kSteps : 1][kTiles][F::kXRegisters];
        const auto load = [&](int step, uint32_t (&to)[kTiles][F::kXRegisters]) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                load_x(to[tile], x[tile], there[tile], first + (4 * step + t) * F::kLane, a.k, a.x_whole);
            }
        };
        if constexpr (kEarly) {
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step) {
                load(step, early[step]);
            }
        }
        cuda::async_wait<kStages - 2>();
        __syncwarp(); // the stage is there, and all lanes are done with the one before
        start(i + kStages - 1);
        __syncwarp(); // lanes beyond the last row take another way there, and mma wants all together
        const unsigned char *const slot = ring + i % kStages * kSlotBytes;
        int group = static_cast<int>(first - span * S::kSpan) >> a.group_shift; // the next, of the table
// Not all steps where x is loaded in between: sm_80 would spill registers.
#pragma unroll kEarly ? S::kSteps : 2
        for (int step = 0; step < S::kSteps; ++step) {
            auto &values = early[kEarly ? step : 0];
            if constexpr (!kEarly) {
                load(step, values);
                __syncwarp(); // lanes at the end of k take another way there, and mma wants all together
            }
            if constexpr (F::kGrouped) {
                constexpr int kStep = 4 * F::kLane; // elements, all of one group
                if (first + step * kStep >= a.k) {
                    break;
                }
                if ((step * kStep & ((1 << a.group_shift) - 1)) == 0) { // a stage begins with a group
                    table.read(scales, g, group++);
                }
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                F::arrange(values[tile]);
            }
            F::template multiply<kTiles>(slot, step, g, t, values, sums, scales);
        }
    };
    if constexpr (F::kGrouped) {
        for (int64_t span = 0; span * S::kSpan < a.k; ++span) {
            const int64_t left = a.k - span * S::kSpan;
            if (span > 0) {
                __syncthreads(); // the table has been read
            }
            table.fill(a, w.n, first_row, span * S::kSpan >> a.group_shift,
                       static_cast<int>((left < S::kSpan ? left : S::kSpan) >> a.group_shift));
            __syncthreads();
            for (int64_t i = span * kSpanStages; i < (span + 1) * kSpanStages && i < mine; ++i) {
                run(i, span);
            }
        }
    } else {
        for (int64_t i = 0; i < mine; ++i) {
            run(i, 0);
        }
    }

    // The warps' sums, in their order.
    constexpr int kPitch = kBlockRows + 4, kRows = kTiles * kTileRows;
    cuda::async_wait<0>();
    __syncthreads();
    auto *const parts = reinterpret_cast<Sum *>(memory);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            parts[(warp * kRows + i * kTileRows + 2 * t + e % 2) * kPitch + g + e / 2 * 8] = sums[i][e];
        }
    }
    __syncthreads();
    for (int i = warp * cuda::kWarp + lane; i < kRows * kBlockRows; i += kWarps * cuda::kWarp) {
        const int m = i / kBlockRows, row = i % kBlockRows;
        if (first_m + m < a.m && first_row + row < w.n) {
            Sum sum = 0;
#pragma unroll
            for (int part = 0; part < kWarps; ++part) {
                sum += parts[(part * kRows + m) * kPitch + row];
            }
            finish(a, w, first_m + m, first_row + row, static_cast<float>(sum));
        }
    }
}

template <typename F, int kTiles> void launch(Problem<typename F::X> a) {
    int groups = 0;
    size_t table = 0;
    if constexpr (F::kGrouped) {
        groups = Stages<F>::span_groups(a.k, a.group_shift);
        table = sizeof(float) * static_cast<size_t>(kBlockRows * Stages<F>::pitch(groups)) *
                (a.zeros.data != nullptr ? 2 : 1);
    }
    constexpr int kRows = kTiles * kTileRows;
    a.x_tiles = (a.m + kRows - 1) / kRows;
    cuda::launch(stream<F, kTiles>, cuda::grid_x(a.blocks() * a.x_tiles), dim3(cuda::kWarp, kWarps), kRingBytes + table,
                 a, groups);
}

// At most kMaxTiles * 8 rows of x for each reading of the weight: 1, 2 or 4.
template <typename F, int kMaxTiles> void multiply(const Problem<typename F::X> &a) {
    if (a.m <= kTileRows) {
        launch<F, 1>(a);
    } else if (kMaxTiles <= 2 || a.m <= 2 * kTileRows) {
        launch<F, 2>(a);
    } else {
        launch<F, kMaxTiles>(a);
    }
}

// ---- float x: multiply-adds ----

constexpr int kFloatRows = 4; // of x, that share one reading of the weight
constexpr int kFloatStep = 4; // elements that a lane has at once

// Elements first .. first + 3 of a row of the weight, as floats; kBits 32, 8 or 4.
template <int kBits>
__device__ __forceinline__ void read_weights(const Problem<float> &a, const Weight &w, int64_t n, int64_t first,
                                             int count, float (&out)[kFloatStep]) {
    const unsigned char *const row = w.data + n * w.row;
    if constexpr (kBits == 32) {
        if (w.whole && count == kFloatStep) {
            const auto vector = *reinterpret_cast<const cuda::Vector<float, 4> *>(row + first * 4);
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                out[i] = vector.values[i];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                out[i] = i < count ? *reinterpret_cast<const float *>(row + (first + i) * w.element) : 0.0f;
            }
        }
    } else if constexpr (kBits == 8) {
        uint32_t bytes = 0;
        if (w.whole && count == kFloatStep) {
            bytes = *reinterpret_cast<const uint32_t *>(row + first);
        } else {
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                bytes |= i < count ? static_cast<uint32_t>(row[(first + i) * w.element]) << 8 * i : 0u;
            }
        }
#pragma unroll
        for (int i = 0; i < kFloatStep; ++i) {
            out[i] = static_cast<float>(static_cast<int8_t>(bytes >> 8 * i));
        }
    } else {
        uint32_t nibbles = row[first / 2 * w.element];
        nibbles |= count > 2 ? static_cast<uint32_t>(row[(first / 2 + 1) * w.element]) << 8 : 0u;
        const int64_t group = first >> a.group_shift;
        const float scale = a.scales[n * a.scales.stride + group];
        const float zero = a.zeros.data != nullptr ? a.zeros[n * a.zeros.stride + group] : 0.0f;
#pragma unroll
        for (int i = 0; i < kFloatStep; ++i) {
            out[i] = static_cast<float>(static_cast<int>(nibbles >> 4 * i & 15u) - 8) * scale + zero;
        }
    }
}

// A warp has two rows of the weight; each lane every 32nd step of k, and the lanes add up.
template <int kBits, int kRows>
__global__ void __launch_bounds__(kWarps *cuda::kWarp) stream_floats(const __grid_constant__ Problem<float> a) {
    cuda::grid_dependency_sync();
    constexpr int kOwn = kBlockRows / kWarps;
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int64_t block = blockIdx.x / a.x_tiles, first_m = blockIdx.x % a.x_tiles * kRows;
    const Weight &w = a.weight[weight_of(a, block)];
    const int64_t first_row = (block - w.first_block) * kBlockRows + warp * kOwn;
    if (first_row >= w.n) {
        return;
    }
    const float *x[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
        int64_t at[2];
        a.rows.locate(first_m + m < a.m ? first_m + m : 0, at);
        x[m] = a.x + at[0];
    }
    float sums[kOwn][kRows] = {};
#pragma unroll 4
    for (int64_t first = lane * kFloatStep; first < a.k; first += cuda::kWarp * kFloatStep) {
        const int count = static_cast<int>(a.k - first < kFloatStep ? a.k - first : kFloatStep);
        float weights[kOwn][kFloatStep];
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            read_weights<kBits>(a, w, first_row + r < w.n ? first_row + r : first_row, first, count, weights[r]);
        }
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            float values[kFloatStep];
            cuda::load(values, x[m] + first, a.x_whole && count == kFloatStep, count);
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
#pragma unroll
                for (int i = 0; i < kFloatStep; ++i) {
                    sums[r][m] += weights[r][i] * values[i];
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            const float sum = cuda::warp_reduce<cuda::Sum>(sums[r][m]);
            if (lane == 0 && first_row + r < w.n && first_m + m < a.m) {
                finish(a, w, first_m + m, first_row + r, sum);
            }
        }
    }
}

template <int kBits> void multiply_floats(Problem<float> a) {
    const bool one = a.m == 1;
    const int64_t rows = one ? 1 : kFloatRows;
    a.x_tiles = (a.m + rows - 1) / rows;
    cuda::launch(one ? stream_floats<kBits, 1> : stream_floats<kBits, kFloatRows>, cuda::grid_x(a.blocks() * a.x_tiles),
                 dim3(cuda::kWarp, kWarps), 0, a);
}

// ---- compiled once, in weight_stream.cu: what several ops use ----

template <typename T> constexpr int64_t kStreamedRows = streamed_rows(sizeof(T));
constexpr int kInt8Tiles = 4;

extern template void multiply<Dense<bf16>, 2>(const Problem<bf16> &);
extern template void multiply<Dense<f16>, 2>(const Problem<f16> &);
extern template void multiply<Int8ByInt8, kInt8Tiles>(const Problem<int8_t> &);
extern template void multiply_floats<32>(Problem<float>);

inline void multiply_dense(const Problem<bf16> &a) {
    multiply<Dense<bf16>, 2>(a);
}
inline void multiply_dense(const Problem<f16> &a) {
    multiply<Dense<f16>, 2>(a);
}
inline void multiply_dense(const Problem<float> &a) {
    multiply_floats<32>(a);
}

} // namespace infini::weight_stream
