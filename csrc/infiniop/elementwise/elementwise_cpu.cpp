// The CPU kernel of the elementwise ops. Formulas are compiled for dense rows only; other strides go through small
// dense buffers, block by block, so that strides cannot change bits.
// Limit: memory bandwidth, each input read once and the output written once.
#include "elementwise.h"
#include "log_odds.h"
#include "streaming_stores.h"
#include "strided.h"
#include "vec.h"

#define INFINI_FORMULA inline
#include "formulas.h"

#include <type_traits>
#include <utility>

namespace infini::INFINI_LEVEL {
namespace {

using elementwise::bits_of_one;
using elementwise::Dtypes;
using elementwise::kMaxTensors;
using elementwise::Op;

constexpr int kMaxInputs = kMaxTensors - 1;
constexpr int64_t kBlock = 256; // elements per block that goes through buffers
// Rows are split among threads at multiples of this many elements, so that no two threads write one cache line.
constexpr int64_t kStep = 64;

// y[i] = formula(x[0][i], ...) for 0 <= i < n, all dense; y may alias an x. large: y may be streamed.
using DenseRow = void (*)(void *y, const void *const *x, int64_t n, bool large);

// The prefetch distance of inputs. Without it, a slow formula keeps too few loads in flight.
constexpr int64_t kAheadBytes = 1024;

template <bool kStream, typename Formula, typename T, size_t... kInput>
void float_row(T *y, const T *const *x, int64_t n, std::index_sequence<kInput...>) {
    const T *in[] = {x[kInput]...};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        (__builtin_prefetch(in[kInput] + i + kAheadBytes / static_cast<int64_t>(sizeof(T))), ...);
        store_or_stream_at<kStream>(y, i, Formula::template of<T>(load_at(in[kInput], i, lanes)...), lanes);
    });
}

// For double and the integers: vectorized by the compiler, or element by element if the formula calls the C library.
template <typename Formula, typename T, size_t... kInput>
void wide_row(T *y, const T *const *x, int64_t n, std::index_sequence<kInput...>) {
    const T *in[] = {x[kInput]...};
#pragma omp simd // y and an input are the same elements, or share none
    for (int64_t i = 0; i < n; ++i) {
        y[i] = Formula::template of<T>(in[kInput][i]...);
    }
}

template <typename Formula, int kInputs, typename T>
void dense_row(void *y, const void *const *x, int64_t n, [[maybe_unused]] bool large) {
    constexpr std::make_index_sequence<kInputs> inputs{};
    auto *out = static_cast<T *>(y);
    const T *in[kInputs];
    for (int t = 0; t < kInputs; ++t) {
        in[t] = static_cast<const T *>(x[t]);
    }
    if constexpr (sizeof(T) == 8 || std::is_integral_v<T>) {
        wide_row<Formula>(out, in, n, inputs);
    } else if (large && stream_aligned(out)) {
        float_row<true, Formula>(out, in, n, inputs);
    } else {
        float_row<false, Formula>(out, in, n, inputs);
    }
}

// The fills: writes the element bits kBits n times. Not by memset, which uses streaming stores for large sizes: filling
// 128 MiB of new memory took 54 ms with it and 46 ms without (Xeon).
template <typename T, uint64_t kBits>
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void fill_row(void *y, const void *const *, int64_t n,
                                                                            bool) {
    auto *out = static_cast<T *>(y);
    for (int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<T>(kBits);
    }
}

namespace formula {

struct zeros {
    static DenseRow row(infiniDtype_t dtype) {
        switch (size_of(dtype)) {
        case 1:
            return fill_row<uint8_t, 0>;
        case 2:
            return fill_row<uint16_t, 0>;
        case 4:
            return fill_row<uint32_t, 0>;
        default:
            return fill_row<uint64_t, 0>;
        }
    }
};

struct ones {
    static DenseRow row(infiniDtype_t dtype) {
        switch (dtype) {
        case INFINI_DTYPE_F8:
            return fill_row<uint8_t, bits_of_one(INFINI_DTYPE_F8)>;
        case INFINI_DTYPE_F16:
            return fill_row<uint16_t, bits_of_one(INFINI_DTYPE_F16)>;
        case INFINI_DTYPE_BF16:
            return fill_row<uint16_t, bits_of_one(INFINI_DTYPE_BF16)>;
        case INFINI_DTYPE_F32:
            return fill_row<uint32_t, bits_of_one(INFINI_DTYPE_F32)>;
        case INFINI_DTYPE_F64:
            return fill_row<uint64_t, bits_of_one(INFINI_DTYPE_F64)>;
        case INFINI_DTYPE_I16:
        case INFINI_DTYPE_U16:
            return fill_row<uint16_t, 1>;
        case INFINI_DTYPE_I32:
        case INFINI_DTYPE_U32:
            return fill_row<uint32_t, 1>;
        case INFINI_DTYPE_I64:
        case INFINI_DTYPE_U64:
            return fill_row<uint64_t, 1>;
        default: // one-byte integers, and bool
            return fill_row<uint8_t, 1>;
        }
    }
};

} // namespace formula

template <typename Formula, int kInputs, Dtypes kDtypes> DenseRow row_of(infiniDtype_t dtype) {
    if constexpr (kDtypes == Dtypes::kAll) {
        return Formula::row(dtype);
    } else {
        switch (dtype) {
        case INFINI_DTYPE_BF16:
            return dense_row<Formula, kInputs, bf16>;
        case INFINI_DTYPE_F16:
            return dense_row<Formula, kInputs, f16>;
        case INFINI_DTYPE_F64:
            return dense_row<Formula, kInputs, double>;
        default:
            break;
        }
        if constexpr (kDtypes == Dtypes::kNumbers) { // unsigned, so that overflow wraps around
            if (dtype == INFINI_DTYPE_I32) {
                return dense_row<Formula, kInputs, uint32_t>;
            }
            if (dtype == INFINI_DTYPE_I64) {
                return dense_row<Formula, kInputs, uint64_t>;
            }
        }
        return dense_row<Formula, kInputs, float>;
    }
}

DenseRow row_of(Op op, infiniDtype_t dtype) {
    switch (op) {
#define INFINI_OP(Name, name, inputs, dtypes, ...)                                                                     \
    case Op::name:                                                                                                     \
        return row_of<formula::name, inputs, Dtypes::dtypes>(dtype);
        INFINI_ELEMENTWISE_OPS(INFINI_OP)
#undef INFINI_OP
    }
    return nullptr;
}

// One row, or a part of it, if at least one tensor is not dense; strides are in elements of kBytes.
template <int kBytes>
void strided_row(DenseRow row, int inputs, char *y, int64_t y_stride, const char *const *x, const int64_t *x_strides,
                 int64_t n, bool large) {
    alignas(64) char buffers[kMaxTensors][kBlock * kBytes];
    const void *in[kMaxInputs] = {};
    for (int t = 0; t < inputs; ++t) {
        if (x_strides[t] == 0) {
            copy_strided<kBytes>(buffers[1 + t], kBytes, x[t], 0, n < kBlock ? n : kBlock);
            in[t] = buffers[1 + t];
        }
    }
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t size = n - begin < kBlock ? n - begin : kBlock;
        for (int t = 0; t < inputs; ++t) {
            const char *from = x[t] + begin * x_strides[t] * kBytes;
            if (x_strides[t] == 1) {
                in[t] = from;
            } else if (x_strides[t] != 0) {
                copy_strided<kBytes>(buffers[1 + t], kBytes, from, x_strides[t] * kBytes, size);
                in[t] = buffers[1 + t];
            }
        }
        char *const to = y + begin * y_stride * kBytes;
        if (y_stride == 1) {
            row(to, in, size, large);
        } else {
            row(buffers[0], in, size, false);
            copy_strided<kBytes>(to, y_stride * kBytes, buffers[0], kBytes, size);
        }
    }
}

template <int kBytes> void all_rows(const elementwise::Args &a) {
    const int inputs = is_fill(a.op) ? 0 : describe(a.op).inputs;
    TensorView views[kMaxTensors];
    for (int t = 0; t < kMaxTensors; ++t) {
        views[t] = a.tensors[t <= inputs ? t : 0]; // the output stands in for missing inputs
    }
    coalesce_dims(views);
    const int last = views[0].ndim - 1;
    if (views[0].shape[last] < kShortRow) {
        move_dim(views, longest_dim(views[0]), last);
    }
    const TensorView *const walked[] = {&views[0], &views[1], &views[2], &views[3]};
    const RowIterator<kMaxTensors> rows(walked);
    const int64_t n = views[0].size(-1), y_stride = views[0].stride(-1);
    int64_t x_strides[kMaxInputs];
    bool dense = y_stride == 1;
    for (int t = 0; t < kMaxInputs; ++t) {
        x_strides[t] = views[1 + t].stride(-1);
        dense = dense && x_strides[t] == 1;
    }
    const DenseRow row = row_of(a.op, views[0].dtype);
    const int64_t bytes = views[0].numel() * kBytes;
    const bool large = worth_streaming(views[0].data, bytes);
    parallel_rows(rows, n, kStep, bytes * (1 + inputs), [&](const int64_t *offsets, int64_t begin, int64_t end) {
        char *const y = views[0].as<char>() + (offsets[0] + begin * y_stride) * kBytes;
        const char *x[kMaxInputs] = {};
        for (int t = 0; t < inputs; ++t) {
            x[t] = views[1 + t].as<const char>() + (offsets[1 + t] + begin * x_strides[t]) * kBytes;
        }
        if (dense) {
            const void *const in[] = {x[0], x[1], x[2]};
            row(y, in, end - begin, large);
        } else {
            strided_row<kBytes>(row, inputs, y, y_stride, x, x_strides, end - begin, large);
        }
        if (large) {
            stream_fence();
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::elementwise::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    switch (size_of(args.tensors[0].dtype)) {
    case 1:
        return all_rows<1>(args);
    case 2:
        return all_rows<2>(args);
    case 4:
        return all_rows<4>(args);
    default:
        return all_rows<8>(args);
    }
}
