// The CPU kernel of the reductions: one pass over all inputs, a vector at a time. Limit: the bandwidth of memory, or of
// the caches that hold the slots.
#include "reduce.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using ccl::Reduction;

// A vector of T's compute type (T itself, or float for half types), or its first n elements.
template <typename T> struct Lanes {
    typedef T Vector __attribute__((vector_size(kLanes * 4)));
    static constexpr int64_t kCount = kLanes * 4 / sizeof(T);
    static Vector load(const T *p, int64_t n) {
        Vector v = {};
        std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(T));
        return v;
    }
    static void store(T *p, Vector v, int64_t n) { std::memcpy(p, &v, static_cast<size_t>(n) * sizeof(T)); }
};

template <typename T> struct LanesOfFloat {
    typedef VecF Vector;
    static constexpr int64_t kCount = kLanes;
    static Vector load(const T *p, int64_t n) {
        using INFINI_LEVEL::load;
        return n == kLanes ? load(p) : load(p, static_cast<int>(n));
    }
    static void store(T *p, Vector v, int64_t n) {
        using INFINI_LEVEL::store;
        n == kLanes ? store(p, v) : store(p, v, static_cast<int>(n));
    }
};
template <> struct Lanes<float> : LanesOfFloat<float> {};
template <> struct Lanes<bf16> : LanesOfFloat<bf16> {};
template <> struct Lanes<f16> : LanesOfFloat<f16> {};

struct Sum {
    template <typename V> static V of(V a, V b) { return a + b; }
    template <typename V> static V last(V a, int) { return a; }
};

struct Prod : Sum {
    template <typename V> static V of(V a, V b) { return a * b; }
};

// If either side is NaN, the result is NaN.
struct Max : Sum {
    template <typename V> static V of(V a, V b) { return ((a > b) | (a != a)) ? a : b; }
};

struct Min : Sum {
    template <typename V> static V of(V a, V b) { return ((a < b) | (a != a)) ? a : b; }
};

struct Avg : Sum {
    static VecF last(VecF a, int inputs) { return a / splat(static_cast<float>(inputs)); }
    template <typename V> static V last(V a, int inputs) { return a / static_cast<double>(inputs); }
};

// kInputs: the number of inputs if known at compile time; 0: r.inputs.
template <typename T, typename Op, int kInputs> void reduce_lines(const Reduction &r) {
    using L = Lanes<T>;
    const int inputs = kInputs > 0 ? kInputs : r.inputs;
    T *const out = static_cast<T *>(r.out);
    const auto vector = [&](int64_t i, int64_t n) {
        auto total = L::load(static_cast<const T *>(r.in[0]) + i, n);
        for (int rank = 1; rank < inputs; ++rank) {
            total = Op::of(total, L::load(static_cast<const T *>(r.in[rank]) + i, n));
        }
        total = Op::last(total, inputs);
        L::store(out + i, total, n);
    };
    int64_t i = 0;
    for (; i + L::kCount <= r.count; i += L::kCount) {
        vector(i, L::kCount);
    }
    if (i < r.count) {
        vector(i, r.count - i);
    }
}

template <typename T, typename Op> void reduce_as(const Reduction &r) {
    r.inputs == 2 ? reduce_lines<T, Op, 2>(r) : reduce_lines<T, Op, 0>(r);
}

template <typename T> void reduce_floats(const Reduction &r) {
    switch (r.op) {
    case INFINICCL_SUM:
        return reduce_as<T, Sum>(r);
    case INFINICCL_PROD:
        return reduce_as<T, Prod>(r);
    case INFINICCL_MAX:
        return reduce_as<T, Max>(r);
    case INFINICCL_MIN:
        return reduce_as<T, Min>(r);
    default:
        return reduce_as<T, Avg>(r);
    }
}

// Signed integers are added and multiplied as unsigned ones, whose overflow is defined: it wraps around.
template <typename T, typename Unsigned> void reduce_integers(const Reduction &r) {
    switch (r.op) {
    case INFINICCL_SUM:
        return reduce_as<Unsigned, Sum>(r);
    case INFINICCL_PROD:
        return reduce_as<Unsigned, Prod>(r);
    case INFINICCL_MAX:
        return reduce_as<T, Max>(r);
    default:
        return reduce_as<T, Min>(r);
    }
}

void reduce_bools(const Reduction &r) {
    const bool any = r.op == INFINICCL_SUM || r.op == INFINICCL_MAX;
    any ? reduce_as<uint8_t, Max>(r) : reduce_as<uint8_t, Min>(r);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::ccl::INFINI_LEVEL::reduce(const Reduction &r) {
    using namespace infini::INFINI_LEVEL;
    switch (r.dtype) {
    case INFINI_DTYPE_F16:
        return reduce_floats<f16>(r);
    case INFINI_DTYPE_BF16:
        return reduce_floats<bf16>(r);
    case INFINI_DTYPE_F32:
        return reduce_floats<float>(r);
    case INFINI_DTYPE_F64:
        return reduce_floats<double>(r);
    case INFINI_DTYPE_BOOL:
        return reduce_bools(r);
    case INFINI_DTYPE_I8:
        return reduce_integers<int8_t, uint8_t>(r);
    case INFINI_DTYPE_I16:
        return reduce_integers<int16_t, uint16_t>(r);
    case INFINI_DTYPE_U16:
        return reduce_integers<uint16_t, uint16_t>(r);
    case INFINI_DTYPE_I32:
        return reduce_integers<int32_t, uint32_t>(r);
    case INFINI_DTYPE_U32:
        return reduce_integers<uint32_t, uint32_t>(r);
    case INFINI_DTYPE_I64:
        return reduce_integers<int64_t, uint64_t>(r);
    case INFINI_DTYPE_U64:
        return reduce_integers<uint64_t, uint64_t>(r);
    default: // BYTE and U8
        return reduce_integers<uint8_t, uint8_t>(r);
    }
}
