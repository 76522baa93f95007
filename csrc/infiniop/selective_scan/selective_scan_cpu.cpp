// The CPU kernel of selective_scan. A few tokens are taken one by one, a vector along each channel's state as it lies.
// Limit: memory bandwidth, the state read and written once. Longer sequences are taken with a vector of channels, whose
// states and rates are transposed once. Limit: the vector units, an exponential for each token, channel and state.
#include "selective_scan.h"

#include "parallel.h"
#include "ssd/time_step.h"
#include "vec.h"

#include <limits>

namespace infini::INFINI_LEVEL {
namespace {

// Channels of a task, a multiple of any vector's lanes; tokens whose b and c are converted to float at a time.
constexpr int64_t kScanChannels = 64, kScanChunk = 64;

// From this many tokens on vectors are of channels.
constexpr int64_t kScanLong = 8;

// A matrix [tokens, channels] of T, or of float if `wide`; absent: data is null.
template <typename T> struct ScanInput {
    const void *data;
    int64_t token, channel; // strides
    bool wide;

    ScanInput(const selective_scan::Args &a, const TensorView &x, int64_t s)
        : data(x.data), token(x.dtype ? token_stride(x, 1) : 0), channel(x.dtype ? x.stride(-1) : 0),
          wide(x.dtype == INFINI_DTYPE_F32) {
        if (x.dtype) {
            data = x.as<const char>() + a.sequences.start(x, 1, s) * static_cast<int64_t>(size_of(x.dtype));
        } else {
            data = nullptr;
        }
    }

    template <typename E, typename Lanes> static VecF read(const E *from, int64_t stride, Lanes lanes) {
        if (stride == 1) {
            return load_at(from, 0, lanes);
        }
        VecF v = {};
        for (int i = 0; i < lanes; ++i) {
            v[i] = widen(from[i * stride]);
        }
        return v;
    }

    template <typename Lanes> VecF at(int64_t t, int64_t c, Lanes lanes) const {
        const int64_t i = t * token + c * channel;
        return wide ? read(static_cast<const float *>(data) + i, channel, lanes)
                    : read(static_cast<const T *>(data) + i, channel, lanes);
    }
};

// One value a channel: of T, or of float if `wide`.
template <typename T, typename Lanes> VecF of_channels(const TensorView &x, int64_t c, Lanes lanes) {
    if (!x.dtype) {
        return splat(0.0f);
    }
    const int64_t stride = x.strides[0];
    return x.dtype == INFINI_DTYPE_F32 ? ScanInput<T>::read(x.as<const float>() + c * stride, stride, lanes)
                                       : ScanInput<T>::read(x.as<const T>() + c * stride, stride, lanes);
}

// A sequence's inputs; T: the dtype of x, O: of y.
template <typename T, typename O> struct Scan {
    const selective_scan::Args &args;
    ScanInput<T> x, dt, z;
    const T *b, *c;
    O *y;
    int64_t b_step, c_step, y_step, length, n;
    float *state; // of the first channel; null: S is not kept
    int64_t state_pitch;
    TimeStep time_step;

    Scan(const selective_scan::Args &a, int64_t s)
        : args(a), x(a, a.x, s), dt(a, a.dt, s), z(a, a.z, s), b(a.b.as<const T>() + a.sequences.start(a.b, 1, s)),
          c(a.c.as<const T>() + a.sequences.start(a.c, 1, s)), y(a.y.as<O>() + a.sequences.start(a.y, 1, s)),
          b_step(token_stride(a.b, 1)), c_step(token_stride(a.c, 1)), y_step(token_stride(a.y, 1)),
          length(a.sequences.length(a.x, 1, s)), n(a.a.shape[1]), state(nullptr), state_pitch(a.state.strides[1]),
          time_step{a.dt_softplus, -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity()} {
        const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
        if (slot >= 0) {
            state = a.state.as<float>() + slot * a.state.strides[0];
        }
    }

    template <typename Lanes>
    void finish(int64_t t, int64_t channel, VecF seen, VecF own, VecF skip, Lanes lanes) const {
        VecF result = fma(skip, own, seen);
        if (z.data != nullptr) {
            const VecF gate = z.at(t, channel, lanes);
            result = result * (gate * sigmoid(gate));
        }
        store_at(y + t * y_step, channel, result, lanes);
    }
};

template <typename T> void read_scan_row(float *to, const T *from, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
}

// A vector of channels, token by token; scratch: b and c as floats, and the states if they are not kept.
template <typename T, typename O, typename Lanes>
void scan_steps(const Scan<T, O> &scan, int64_t channel, Lanes lanes, float *scratch) {
    const int64_t n = scan.n, rates_pitch = scan.args.a.strides[0];
    float *const b = scratch, *const c = b + n;
    float *state = c + n;
    int64_t pitch = n;
    if (scan.state != nullptr) {
        state = scan.state + channel * scan.state_pitch;
        pitch = scan.state_pitch;
    } else {
        for (int64_t i = 0; i < lanes * n; ++i) {
            state[i] = 0.0f;
        }
    }
    const float *const rates = scan.args.a.template as<const float>() + channel * rates_pitch;
    const VecF bias = of_channels<T>(scan.args.dt_bias, channel, lanes);
    const VecF skip = of_channels<T>(scan.args.d, channel, lanes);
    for (int64_t t = 0; t < scan.length; ++t) {
        read_scan_row(b, scan.b + t * scan.b_step, n);
        read_scan_row(c, scan.c + t * scan.c_step, n);
        const VecF own = scan.x.at(t, channel, lanes);
        const VecF step = scan.time_step.of(scan.dt.at(t, channel, lanes), bias), add = step * own;
        VecF seen[kLanes];
        for (int r = 0; r < kLanes; ++r) {
            VecF total = {};
            if (r < lanes) {
                float *const s = state + r * pitch;
                for_each_vector(n, [&](int64_t i, auto some) {
                    const VecF decay = exp(splat(step[r]) * load_at(rates + r * rates_pitch, i, some));
                    const VecF next = fma(splat(add[r]), load_at(b, i, some), decay * load_at(s, i, some));
                    store_at(s, i, next, some);
                    total = fma(load_at(c, i, some), next, total);
                });
            }
            seen[r] = total;
        }
        scan.finish(t, channel, sums([&](int i) { return seen[i]; }), own, skip, lanes);
    }
}

// Tokens [first, first + count) of a vector of channels, count <= kScanChunk; b and c [count, n] as floats, states and
// rates [n, kLanes].
template <typename T, typename O, typename Lanes>
void scan_chunk(const Scan<T, O> &scan, int64_t channel, Lanes lanes, int64_t first, int64_t count, const float *b,
                const float *c, float *states, const float *rates) {
    const int64_t n = scan.n;
    const VecF bias = of_channels<T>(scan.args.dt_bias, channel, lanes);
    const VecF skip = of_channels<T>(scan.args.d, channel, lanes);
    for (int64_t t = 0; t < count; ++t, b += n, c += n) {
        const VecF own = scan.x.at(first + t, channel, lanes);
        const VecF step = scan.time_step.of(scan.dt.at(first + t, channel, lanes), bias), add = step * own;
        VecF seen[2] = {};
        const auto state_of = [&](int64_t i, int of) {
            const VecF decay = exp(step * load(rates + i * kLanes));
            const VecF next = fma(add, splat(b[i]), decay * load(states + i * kLanes));
            store(states + i * kLanes, next);
            seen[of] = fma(splat(c[i]), next, seen[of]);
        };
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) { // four exponentials in flight
            state_of(i, 0);
            state_of(i + 1, 1);
            state_of(i + 2, 0);
            state_of(i + 3, 1);
        }
        for (; i < n; ++i) {
            state_of(i, 0);
        }
        scan.finish(first + t, channel, seen[0] + seen[1], own, skip, lanes);
    }
}

// In floats: b and c of a chunk, states and rates of all channels of a task.
inline int64_t scan_scratch(int64_t n) {
    return 2 * kScanChunk * n + 2 * kScanChannels * n;
}

// Channels [begin, end) of a sequence.
template <typename T, typename O>
void scan_channels(const selective_scan::Args &args, int64_t s, int64_t begin, int64_t end, float *scratch) {
    const Scan<T, O> scan(args, s);
    const int64_t n = scan.n, pitch = args.a.strides[0];
    if (scan.length == 0) {
        return; // the state stays
    }
    if (scan.length < kScanLong) {
        for_each_vector(end - begin, [&](int64_t i, auto lanes) { scan_steps(scan, begin + i, lanes, scratch); });
        return;
    }
    float *const b = scratch, *const c = b + kScanChunk * n;
    float *const states = c + kScanChunk * n, *const rates = states + kScanChannels * n;
    for_each_vector(end - begin, [&](int64_t i, auto lanes) {
        for (int r = 0; r < kLanes; ++r) {
            const int64_t channel = begin + i + r;
            for (int64_t j = 0; j < n; ++j) {
                const int64_t to = i * n + j * kLanes + r;
                rates[to] = r < lanes ? args.a.as<const float>()[channel * pitch + j] : 0.0f;
                states[to] = r < lanes && scan.state != nullptr ? scan.state[channel * scan.state_pitch + j] : 0.0f;
            }
        }
    });
    for (int64_t t = 0; t < scan.length; t += kScanChunk) {
        const int64_t left = scan.length - t, count = left < kScanChunk ? left : kScanChunk;
        for (int64_t i = 0; i < count; ++i) {
            read_scan_row(b + i * n, scan.b + (t + i) * scan.b_step, n);
            read_scan_row(c + i * n, scan.c + (t + i) * scan.c_step, n);
        }
        for_each_vector(end - begin, [&](int64_t i, auto lanes) {
            scan_chunk(scan, begin + i, lanes, t, count, b, c, states + i * n, rates + i * n);
        });
    }
    for (int64_t i = begin; scan.state != nullptr && i < end; ++i) {
        const int64_t vector = (i - begin) / kLanes * kLanes;
        for (int64_t j = 0; j < n; ++j) {
            scan.state[i * scan.state_pitch + j] = states[vector * n + j * kLanes + (i - begin - vector)];
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::selective_scan::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const int64_t channels = args.x.size(-1), parts = (channels + kScanChannels - 1) / kScanChannels;
    const int64_t n = args.a.shape[1], count = args.sequences.count(args.x, 1) * parts;
    const int64_t bytes = args.x.numel() * n * 8; // the traffic of the state, which the first cache has
    with_float_type(args.x.dtype, [&](auto x) {
        using T = decltype(x);
        const auto compute = [&](auto y) {
            using O = decltype(y);
            parallel_for_with_scratch(
                count, bytes, scan_scratch(n) * static_cast<int64_t>(sizeof(float)),
                [&](int64_t begin, int64_t end, char *scratch) {
                    for (int64_t i = begin; i < end; ++i) {
                        const int64_t first = i % parts * kScanChannels, last = first + kScanChannels;
                        scan_channels<T, O>(args, i / parts, first, last < channels ? last : channels,
                                            reinterpret_cast<float *>(scratch));
                    }
                });
        };
        if (args.y.dtype == INFINI_DTYPE_F32) {
            compute(float{});
        } else {
            compute(T{});
        }
    });
}
