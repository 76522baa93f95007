// Rows of any float dtype that are converted to float and back at the edges of a kernel, so that its arithmetic is compiled
// for float alone. Shared by gated_delta_rule and ssd. Included by *_cpu.cpp files after vec.h.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Reads a row as floats, and zeros up to a multiple of 16; writes one.
template <typename T> void read_converted(float *to, const void *data, int64_t n) {
    const T *const from = static_cast<const T *>(data);
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
    for (int64_t i = n; i % 16 != 0; ++i) {
        to[i] = 0.0f;
    }
}

template <typename T> void write_converted(void *data, const float *from, int64_t n) {
    T *const to = static_cast<T *>(data);
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
}

template <typename T> float read_converted_number(const void *data) {
    return widen(*static_cast<const T *>(data));
}

struct ConvertedRows {
    char *data;
    int64_t step, head, size; // from token to token and from head to head in elements; bytes of an element
    void (*read_row)(float *, const void *, int64_t);
    void (*write_row)(void *, const float *, int64_t);
    float (*read_number)(const void *);

    // first: the first element, of the first head; absent: data is null.
    ConvertedRows(const TensorView &x, int64_t first, int64_t token_step, int64_t head_step)
        : data(nullptr), step(token_step), head(head_step), size(0), read_row(nullptr), write_row(nullptr),
          read_number(nullptr) {
        if (x.dtype) {
            size = static_cast<int64_t>(size_of(x.dtype));
            data = const_cast<char *>(x.as<const char>()) + first * size;
            with_float_type(x.dtype, [&](auto type) {
                using T = decltype(type);
                read_row = read_converted<T>;
                write_row = write_converted<T>;
                read_number = read_converted_number<T>;
            });
        }
    }

    char *at(int64_t t, int64_t h) const { return data + (t * step + h * head) * size; }
    void read(float *to, int64_t t, int64_t h, int64_t n) const { read_row(to, at(t, h), n); }
    void write(const float *from, int64_t t, int64_t h, int64_t n) const { write_row(at(t, h), from, n); }
    float number(int64_t t, int64_t h) const { return data == nullptr ? 0.0f : read_number(at(t, h)); }

    // Of n elements of token t, whose row the hardware does not foresee.
    void prefetch(int64_t t, int64_t n) const {
        const char *const from = at(t, 0);
        for (int64_t i = 0; i < n * size; i += 64) {
            __builtin_prefetch(from + i);
        }
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
