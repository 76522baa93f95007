// Streaming (non-temporal) stores, for outputs too large to stay in a cache until they are read again. An ordinary
// store first reads the cache line it writes to; a streaming store does not, and leaves the cache to the inputs.
// Included only by *_cpu.cpp files, like vec.h.
#pragma once

#include "new_output.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// From this many bytes of output on they are faster: twice the 32 MiB of last-level cache of the machine measured (two
// Zen 5 cores). Far beyond the cache a copy on one core ran at 47 GB/s with them and 37 without, inside it at 87 and
// 125.
constexpr int64_t kStreamBytes = 64 << 20;

// Whether to stream an output of this many bytes. Not into new memory, which the kernel's zeroing has brought into the
// cache: embedding of 128 MiB took 86 ms with streaming stores, 64 of them the page faults, where torch took 64 (Xeon).
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

#else // ordinary stores

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

// After the last streaming store of a thread: other threads see the stores before whatever it writes next.
inline void stream_fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

} // namespace
} // namespace infini::INFINI_LEVEL
