// Streaming (non-temporal) stores, for outputs too large to stay in a cache until they are read again. An ordinary
// store first reads the cache line it writes to; a streaming store does not, and leaves the cache to the inputs.
// Included only by *_cpu.cpp files, like vec.h.
#pragma once

#include "new_output.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Streaming stores are faster from this many bytes of output on: twice the last-level cache (32 MiB) of the machine
// measured (two Zen 5 cores). A copy on one core far larger than the cache ran at 47 GB/s with them and 37 GB/s
// without; one inside the cache at 87 and 125 GB/s.
constexpr int64_t kStreamBytes = 64 << 20;

// Whether to stream an output of this many bytes. Not into newly allocated memory, which is in the cache after the
// kernel (the OS) has zeroed it: embedding of 128 MiB took 86 ms with streaming stores, 64 ms of them page faults, and
// torch 64 ms (Xeon).
inline bool worth_streaming(const void *output, int64_t bytes) {
    return bytes >= kStreamBytes && !cpu::take_new_output(output);
}

// Whether p is aligned for streaming stores of whole vectors.
template <typename T> inline bool stream_aligned(const T *p) {
    return reinterpret_cast<uintptr_t>(p) % (kLanes * sizeof(T)) == 0;
}

#if defined(__AVX512F__)

inline void stream(float *p, VecF v) {
    _mm512_stream_ps(p, v);
}

inline void stream_halves(void *p, VecH h) {
    _mm256_stream_si256(static_cast<__m256i *>(p), (__m256i)h);
}

#elif defined(__AVX2__)

inline void stream(float *p, VecF v) {
    _mm256_stream_ps(p, v);
}

inline void stream_halves(void *p, VecH h) {
    _mm_stream_si128(static_cast<__m128i *>(p), (__m128i)h);
}

#else // without streaming stores

inline void stream(float *p, VecF v) {
    store(p, v);
}

inline void stream_halves(void *p, VecH h) {
    std::memcpy(p, &h, sizeof h);
}

#endif

inline void stream(bf16 *p, VecF v) {
    stream_halves(p, narrow_bf16(v));
}

inline void stream(f16 *p, VecF v) {
    stream_halves(p, narrow_f16(v));
}

// As store_at in vec.h; whole vectors are streamed if kStream, from a row that is stream_aligned.
template <bool kStream, typename T> inline void store_or_stream_at(T *p, int64_t i, VecF v, Full lanes) {
    if constexpr (kStream) {
        stream(p + i, v);
    } else {
        store_at(p, i, v, lanes);
    }
}

template <bool kStream, typename T> inline void store_or_stream_at(T *p, int64_t i, VecF v, int lanes) {
    store_at(p, i, v, lanes);
}

// Call after a thread's last streaming store, so that other threads see the stores before its later writes.
inline void stream_fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

} // namespace
} // namespace infini::INFINI_LEVEL
