// The CPU kernel of causal_conv1d: token by token over ranges of channels, each vector of a token from the rows of the
// tokens before it, which are in the first cache. Limit: memory bandwidth, x read once and y written once.
#include "causal_conv1d.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using causal_conv1d::kMaxWidth;

// Channels of a work item: width rows of them stay in the first cache, and a prompt has enough items for all threads.
constexpr int64_t kConvChannels = 512;

// The scratch of an item: weights and bias in float [width + 1][channels], then columns and one new token in T.
inline int64_t conv_scratch_bytes(const causal_conv1d::Args &a) {
    const int64_t columns = a.state.dtype ? a.state.shape[2] : a.weight.shape[1] - 1;
    return (a.weight.shape[1] + 1 + columns) * kConvChannels * static_cast<int64_t>(sizeof(float));
}

template <int kWidth, bool kSilu, typename T>
void convolve_token(T *y, const T *const (&rows)[kMaxWidth], const float *weight, const float *bias, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        VecF sum = load_at(bias, i, lanes);
        for (int j = 0; j < kWidth; ++j) {
            sum = fma(load_at(weight + j * kConvChannels, i, lanes), load_at(rows[j], i, lanes), sum);
        }
        if constexpr (kSilu) {
            sum = sum / (splat(1.0f) + exp_for<T>(-sum));
        }
        store_at(y, i, sum, lanes);
    });
}

// Channels [c, c + n) of sequence s.
template <int kWidth, bool kSilu, typename T, typename W>
void convolve(const causal_conv1d::Args &a, int64_t s, int64_t c, int64_t n, char *scratch) {
    const int64_t length = a.sequences.length(a.x, 1, s);
    if (length == 0) {
        return; // the state stays
    }
    float *const weight = reinterpret_cast<float *>(scratch), *const bias = weight + kWidth * kConvChannels;
    T *const history = reinterpret_cast<T *>(bias + kConvChannels);
    const int64_t apart = a.weight.strides[0];
    for (int64_t j = 0; j < kWidth; ++j) {
        const W *const from = a.weight.as<const W>() + c * apart + j * a.weight.strides[1];
        float *const to = weight + j * kConvChannels;
        if (apart == 1) {
            for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
        } else {
            for (int64_t i = 0; i < n; ++i) {
                to[i] = widen(from[i * apart]);
            }
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        bias[i] = a.bias.dtype ? widen(a.bias.as<const W>()[(c + i) * a.bias.strides[0]]) : 0.0f;
    }
    const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
    const int64_t columns = a.state.dtype ? a.state.shape[2] : kWidth - 1;
    T *const state = slot < 0 ? nullptr : a.state.as<T>() + slot * a.state.strides[0] + c * a.state.strides[1];
    for (int64_t j = 0; j < columns; ++j) {
        for (int64_t i = 0; i < n; ++i) {
            history[j * kConvChannels + i] =
                state == nullptr ? T{} : state[i * a.state.strides[1] + j * a.state.strides[2]];
        }
    }
    const int64_t step = token_stride(a.x, 1), y_step = token_stride(a.y, 1);
    const T *const x = a.x.as<const T>() + a.sequences.start(a.x, 1, s) + c;
    T *const y = a.y.as<T>() + a.sequences.start(a.y, 1, s) + c;
    // The channels of token t, which may precede the sequence.
    const auto row = [&](int64_t t) { return t < 0 ? history + (columns + t) * kConvChannels : x + t * step; };
    for (int64_t t = 0; t < length; ++t) {
        const T *rows[kMaxWidth];
        for (int j = 0; j < kWidth; ++j) {
            rows[j] = row(t - kWidth + 1 + j);
        }
        convolve_token<kWidth, kSilu>(y + t * y_step, rows, weight, bias, n);
    }
    for (int64_t j = 0; state != nullptr && j < columns; ++j) {
        const T *const from = row(length - columns + j);
        for (int64_t i = 0; i < n; ++i) {
            state[i * a.state.strides[1] + j * a.state.strides[2]] = from[i];
        }
    }
}

template <int kWidth, typename T> void convolve_all(const causal_conv1d::Args &a) {
    const int64_t channels = a.x.size(-1), tiles = (channels + kConvChannels - 1) / kConvChannels;
    const int64_t bytes = 2 * a.x.numel() * static_cast<int64_t>(sizeof(T));
    with_float_type(a.weight.dtype, [&](auto weight) {
        using W = decltype(weight);
        parallel_for_with_scratch(a.sequences.count(a.x, 1) * tiles, bytes, conv_scratch_bytes(a),
                                  [&](int64_t begin, int64_t end, char *scratch) {
                                      for (int64_t i = begin; i < end; ++i) {
                                          const int64_t c = i % tiles * kConvChannels, left = channels - c;
                                          const int64_t n = left < kConvChannels ? left : kConvChannels;
                                          a.silu ? convolve<kWidth, true, T, W>(a, i / tiles, c, n, scratch)
                                                 : convolve<kWidth, false, T, W>(a, i / tiles, c, n, scratch);
                                      }
                                  });
    });
}

template <typename T, int kWidth = 2> void with_width(const causal_conv1d::Args &a) {
    if constexpr (kWidth < kMaxWidth) {
        if (a.weight.shape[1] != kWidth) {
            return with_width<T, kWidth + 1>(a);
        }
    }
    convolve_all<kWidth, T>(a);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::causal_conv1d::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto x) { with_width<decltype(x)>(args); });
}
