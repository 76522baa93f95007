// The CPU kernel of selective_scan. A few tokens are taken one by one, a vector along each channel's state as it lies.
// Limit: memory bandwidth, the state read and written once. Longer sequences are taken with a vector of channels, whose
// states and rates are transposed once. Limit: the vector units, an exponential for each token, channel and state.
#include "selective_scan.h"

#include "parallel.h"
#include "sequence_states/time_step.h"
#include "vec.h"

#include <limits>

namespace infini::INFINI_LEVEL {
namespace {

// Channels of a task, a multiple of any vector's lanes; tokens whose b and c are converted to float at a time.
constexpr int64_t kScanChannels = 64, kScanChunk = 64;

// From this many tokens on vectors are of channels.
constexpr int64_t kScanLong = 8;

// `lanes` values `stride` apart; the other lanes are zeros.
template <typename T> VecF read_scan_values(const void *data, int64_t stride, int lanes) {
    const T *const from = static_cast<const T *>(data);
    if (stride == 1) {
        return load(from, lanes);
    }
    float values[kLanes] = {};
    for (int i = 0; i < lanes; ++i) {
        values[i] = widen(from[i * stride]);
    }
    return load(values);
}

// What is not a whole vector of float or bfloat16 is read and written by calls, for the size of the token loops.
inline __attribute__((noinline)) VecF read_scan_vector(const void *data, infiniDtype_t dtype, int64_t stride,
                                                       int lanes) {
    VecF v = {};
    if (lanes == kLanes && stride == 1 && dtype == INFINI_DTYPE_F16) {
        return load(static_cast<const f16 *>(data));
    }
    with_float_type(dtype, [&](auto type) { v = read_scan_values<decltype(type)>(data, stride, lanes); });
    return v;
}

inline __attribute__((noinline)) void write_scan_vector(void *data, infiniDtype_t dtype, VecF v, int lanes) {
    if (lanes == kLanes && dtype == INFINI_DTYPE_F16) {
        return store(static_cast<f16 *>(data), v);
    }
    with_float_type(dtype, [&](auto type) { store(static_cast<decltype(type) *>(data), v, lanes); });
}

template <typename T> void read_scan_rows(float *to, const void *data, int64_t row, int64_t rows, int64_t n) {
    const T *from = static_cast<const T *>(data);
    for (int64_t r = 0; r < rows; ++r, from += row, to += n) {
        for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
    }
}

// A matrix [tokens, channels] of one sequence; absent: data is null.
struct ScanMatrix {
    char *data;
    infiniDtype_t dtype;
    int64_t token, channel, size; // strides in elements; bytes of an element

    ScanMatrix(const selective_scan::Args &a, const TensorView &x, int64_t s)
        : data(nullptr), dtype(INFINI_DTYPE_F32), token(0), channel(0), size(0) {
        if (x.dtype) {
            dtype = x.dtype;
            token = token_stride(x, 1);
            channel = x.stride(-1);
            size = static_cast<int64_t>(size_of(x.dtype));
            data = const_cast<char *>(x.as<const char>()) + a.sequences.start(x, 1, s) * size;
        }
    }

    // One value a channel.
    explicit ScanMatrix(const TensorView &x) : data(nullptr), dtype(INFINI_DTYPE_F32), token(0), channel(0), size(0) {
        if (x.dtype) {
            dtype = x.dtype;
            channel = x.strides[0];
            size = static_cast<int64_t>(size_of(x.dtype));
            data = const_cast<char *>(x.as<const char>());
        }
    }

    char *at(int64_t t, int64_t c) const { return data + (t * token + c * channel) * size; }

    // Channels [c, c + lanes) of token t.
    VecF vector(int64_t t, int64_t c, int lanes) const {
        const char *const from = at(t, c);
        if (channel == 1 && lanes == kLanes && dtype != INFINI_DTYPE_F16) {
            return dtype == INFINI_DTYPE_F32 ? load(reinterpret_cast<const float *>(from))
                                             : load(reinterpret_cast<const bf16 *>(from));
        }
        return read_scan_vector(from, dtype, channel, lanes);
    }

    VecF vector_or_zeros(int64_t c, int lanes) const { return data == nullptr ? splat(0.0f) : vector(0, c, lanes); }

    void write(int64_t t, int64_t c, VecF v, int lanes) const {
        char *const to = at(t, c);
        if (lanes == kLanes && dtype == INFINI_DTYPE_F32) {
            store(reinterpret_cast<float *>(to), v);
        } else if (lanes == kLanes && dtype == INFINI_DTYPE_BF16) {
            store(reinterpret_cast<bf16 *>(to), v);
        } else {
            write_scan_vector(to, dtype, v, lanes);
        }
    }
};

// A sequence's inputs.
struct Scan {
    const selective_scan::Args &args;
    ScanMatrix x, dt, z, b, c, y, d, bias;
    int64_t length, n;
    float *state; // of the first channel; null: S is not kept
    int64_t state_pitch;
    TimeStep time_step;

    Scan(const selective_scan::Args &a, int64_t s)
        : args(a), x(a, a.x, s), dt(a, a.dt, s), z(a, a.z, s), b(a, a.b, s), c(a, a.c, s), y(a, a.y, s), d(a.d),
          bias(a.dt_bias), length(a.sequences.length(a.x, 1, s)), n(a.a.shape[1]), state(nullptr),
          state_pitch(a.state.strides[1]),
          time_step{a.dt_softplus, -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity()} {
        const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
        if (slot >= 0) {
            state = a.state.as<float>() + slot * a.state.strides[0];
        }
    }

    void finish(int64_t t, int64_t channel, VecF seen, VecF own, VecF skip, int lanes) const {
        VecF result = fma(skip, own, seen);
        if (z.data != nullptr) {
            const VecF gate = z.vector(t, channel, lanes);
            result = result * (gate * sigmoid(gate));
        }
        y.write(t, channel, result, lanes);
    }

    // b and c of tokens [t, t + count), [count, n] as floats.
    void read_b_and_c(int64_t t, int64_t count, float *to_b, float *to_c) const {
        with_float_type(b.dtype, [&](auto type) {
            read_scan_rows<decltype(type)>(to_b, b.at(t, 0), b.token, count, n);
            read_scan_rows<decltype(type)>(to_c, c.at(t, 0), c.token, count, n);
        });
    }
};

// All tokens of a vector of channels, token by token, on the states as they lie; b and c [length, n] as floats.
template <typename Lanes>
void scan_steps(const Scan &scan, int64_t channel, Lanes lanes, const float *b, const float *c, float *state) {
    const int64_t n = scan.n, rates_pitch = scan.args.a.strides[0];
    int64_t pitch = n;
    if (scan.state != nullptr) {
        state = scan.state + channel * scan.state_pitch;
        pitch = scan.state_pitch;
    } else {
        for (int64_t i = 0; i < lanes * n; ++i) {
            state[i] = 0.0f;
        }
    }
    const float *const rates = scan.args.a.as<const float>() + channel * rates_pitch;
    const VecF bias = scan.bias.vector_or_zeros(channel, lanes), skip = scan.d.vector_or_zeros(channel, lanes);
    for (int64_t t = 0; t < scan.length; ++t, b += n, c += n) {
        const VecF own = scan.x.vector(t, channel, lanes);
        const VecF step = scan.time_step.of(scan.dt.vector(t, channel, lanes), bias), add = step * own;
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
inline void scan_chunk(const Scan &scan, int64_t channel, int lanes, int64_t first, int64_t count, const float *b,
                       const float *c, float *states, const float *rates) {
    const int64_t n = scan.n;
    const VecF bias = scan.bias.vector_or_zeros(channel, lanes), skip = scan.d.vector_or_zeros(channel, lanes);
    for (int64_t t = 0; t < count; ++t, b += n, c += n) {
        const VecF own = scan.x.vector(first + t, channel, lanes);
        const VecF step = scan.time_step.of(scan.dt.vector(first + t, channel, lanes), bias), add = step * own;
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
inline void scan_channels(const Scan &scan, int64_t begin, int64_t end, float *scratch) {
    const selective_scan::Args &args = scan.args;
    const int64_t n = scan.n, pitch = args.a.strides[0];
    if (scan.length == 0) {
        return; // the state stays
    }
    if (scan.length < kScanLong) {
        float *const b = scratch, *const c = b + scan.length * n, *const states = c + scan.length * n;
        scan.read_b_and_c(0, scan.length, b, c);
        for_each_vector(end - begin, [&](int64_t i, auto lanes) { scan_steps(scan, begin + i, lanes, b, c, states); });
        return;
    }
    float *const b = scratch, *const c = b + kScanChunk * n;
    float *const states = c + kScanChunk * n, *const rates = states + kScanChannels * n;
    const auto for_channels = [&](const auto &body) { // body(i, lanes): one instantiation, unlike for_each_vector
        for (int64_t i = 0; i < end - begin; i += kLanes) {
            const int64_t left = end - begin - i;
            body(i, static_cast<int>(left < kLanes ? left : kLanes));
        }
    };
    for_channels([&](int64_t i, int lanes) {
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
        scan.read_b_and_c(t, count, b, c);
        for_channels([&](int64_t i, int lanes) {
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
    parallel_for_with_scratch(count, bytes, scan_scratch(n) * static_cast<int64_t>(sizeof(float)),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  for (int64_t i = begin; i < end;) {
                                      const int64_t s = i / parts;
                                      const Scan scan(args, s);
                                      for (; i < end && i / parts == s; ++i) {
                                          const int64_t first = i % parts * kScanChannels, last = first + kScanChannels;
                                          scan_channels(scan, first, last < channels ? last : channels,
                                                        reinterpret_cast<float *>(scratch));
                                      }
                                  }
                              });
}
