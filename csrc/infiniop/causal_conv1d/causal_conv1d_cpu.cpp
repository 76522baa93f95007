// The CPU kernel of causal_conv1d: token by token over ranges of channels, each vector of a token from the rows of the
// tokens before it, which are in the first cache. Limit: memory bandwidth, x read once and y written once.
#include "causal_conv1d.h"
#include "parallel.h"
#include "vec.h"

#include <cstring>

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

// A range of n channels of a sequence. Token t < 0 precedes the sequence: its row ends at `history`.
template <typename T> struct Tokens {
    const T *x, *history;
    T *y;
    int64_t step, y_step, length, n;

    const T *row(int64_t t) const { return t < 0 ? history + t * kConvChannels : x + t * step; }
};

// The usual widths are compiled; kWidth = 0 stands for any.
template <int kWidth, bool kSilu, typename T>
void convolve_tokens(const Tokens<T> &tokens, const float *weight, const float *bias, int any_width) {
    const int width = kWidth > 0 ? kWidth : any_width;
    for (int64_t t = 0; t < tokens.length; ++t) {
        const T *rows[kMaxWidth];
        for (int j = 0; j < width; ++j) {
            rows[j] = tokens.row(t - width + 1 + j);
        }
        T *const y = tokens.y + t * tokens.y_step;
        for_each_vector(tokens.n, [&](int64_t i, auto lanes) {
            VecF sum = load_at(bias, i, lanes);
            for (int j = 0; j < width; ++j) {
                sum = fma(load_at(weight + j * kConvChannels, i, lanes), load_at(rows[j], i, lanes), sum);
            }
            if constexpr (kSilu) {
                sum = sum / (splat(1.0f) + exp_for<T>(-sum));
            }
            store_at(y, i, sum, lanes);
        });
    }
}

template <typename T> decltype(&convolve_tokens<0, false, T>) kernel_for(int64_t width, bool silu) {
    switch (width) {
    case 3: // LFM2
        return silu ? convolve_tokens<3, true, T> : convolve_tokens<3, false, T>;
    case 4: // Mamba and the delta nets
        return silu ? convolve_tokens<4, true, T> : convolve_tokens<4, false, T>;
    default:
        return silu ? convolve_tokens<0, true, T> : convolve_tokens<0, false, T>;
    }
}

// Channels [c, c + n) of the weights and the bias in float.
template <typename W>
void load_weights(const causal_conv1d::Args &a, int64_t c, int64_t n, float *weight, float *bias) {
    const int64_t apart = a.weight.strides[0];
    for (int64_t j = 0; j < a.weight.shape[1]; ++j) {
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
}

// Channels [c, c + n) of sequence s.
template <typename T> void convolve(const causal_conv1d::Args &a, int64_t s, int64_t c, int64_t n, char *scratch) {
    const int64_t length = a.sequences.length(a.x, 1, s);
    if (length == 0) {
        return; // the state stays
    }
    const int width = static_cast<int>(a.weight.shape[1]);
    float *const weight = reinterpret_cast<float *>(scratch), *const bias = weight + width * kConvChannels;
    T *const history = reinterpret_cast<T *>(bias + kConvChannels);
    with_float_type(a.weight.dtype, [&](auto type) { load_weights<decltype(type)>(a, c, n, weight, bias); });
    const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
    const int64_t columns = a.state.dtype ? a.state.shape[2] : width - 1;
    T *const state = slot < 0 ? nullptr : a.state.as<T>() + slot * a.state.strides[0] + c * a.state.strides[1];
    for (int64_t j = 0; j < columns; ++j) {
        T *const to = history + j * kConvChannels;
        if (state == nullptr) {
            std::memset(static_cast<void *>(to), 0, static_cast<size_t>(n) * sizeof(T));
            continue;
        }
        for (int64_t i = 0; i < n; ++i) {
            to[i] = state[i * a.state.strides[1] + j * a.state.strides[2]];
        }
    }
    const Tokens<T> tokens{a.x.as<const T>() + a.sequences.start(a.x, 1, s) + c,
                           history + columns * kConvChannels,
                           a.y.as<T>() + a.sequences.start(a.y, 1, s) + c,
                           token_stride(a.x, 1),
                           token_stride(a.y, 1),
                           length,
                           n};
    kernel_for<T>(width, a.silu)(tokens, weight, bias, width);
    for (int64_t j = 0; state != nullptr && j < columns; ++j) {
        const T *const from = tokens.row(length - columns + j);
        for (int64_t i = 0; i < n; ++i) {
            state[i * a.state.strides[1] + j * a.state.strides[2]] = from[i];
        }
    }
}

template <typename T> void convolve_all(const causal_conv1d::Args &a) {
    const int64_t channels = a.x.size(-1), tiles = (channels + kConvChannels - 1) / kConvChannels;
    const int64_t bytes = 2 * a.x.numel() * static_cast<int64_t>(sizeof(T));
    parallel_for_with_scratch(a.sequences.count(a.x, 1) * tiles, bytes, conv_scratch_bytes(a),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  for (int64_t i = begin; i < end; ++i) {
                                      const int64_t c = i % tiles * kConvChannels, left = channels - c;
                                      convolve<T>(a, i / tiles, c, left < kConvChannels ? left : kConvChannels,
                                                  scratch);
                                  }
                              });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::causal_conv1d::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto x) { convolve_all<decltype(x)>(args); });
}
