// A few rows of x times bfloat16 weights in vector registers, bit for bit as in tile_product.h: so a row's bits do not
// depend on the batch, and a single row is not bound by tile loads, of which few are in flight at once.
// The order is that of TDPBF16PS: in each step of 32 elements of k, the even and the odd elements are summed separately
// and then added to each other; the sums of the steps are added from the first on. Denormals count as zero. A lane
// holds one step: four steps of each of four rows of w, which are read in streams and transposed. The steps of a row
// are added once all are computed. (Sixteen rows of one step each would lie 4 KiB apart for k = 2048, in the same sets
// of L1.)
// Limit: memory bandwidth of w. A KiB of it takes 64 shuffles, 32 instructions that split pairs, and 32 multiply-adds
// per row of x: 64 cycles with one row and 80 with two, if two vectors issue per cycle: 40 and 32 GB/s at 2.5 GHz. A
// program around this header (not kept) on a Zen 4 core that reads 26 GB/s reached 20 GB/s with one row and 16 GB/s
// with two; without prefetches 13 to 16 GB/s. Not measured on a CPU with tiles.
#pragma once

#include "parallel.h"
#include "scratch.h"
#include "tile_product.h"

namespace infini::INFINI_LEVEL {
namespace {

// The largest number of rows of x that uses this code.
constexpr int64_t kFewTileRows = 2;

#if defined(INFINI_EMULATED_TILES) && !defined(__AVX512F__)
static_assert(sizeof(VecF) == sizeof(FourFloats));

struct DenormalsAreZero {
    DenormalsAreZero() {}
};
inline VecF add_tile_products(VecF a, VecF b, VecF sum) {
    return (VecF)add_products(without_denormals((FourFloats)a), without_denormals((FourFloats)b), (FourFloats)sum);
}
inline VecF add_tile_sums(VecF a, VecF b) {
    return (VecF)without_denormals((FourFloats)a + (FourFloats)b);
}
#else
// Sets MXCSR's FTZ and DAZ for a scope. Functions called in the scope must not be inlined, because the compiler would
// move arithmetic out of it.
struct DenormalsAreZero {
    const unsigned before = _mm_getcsr();
    DenormalsAreZero() { _mm_setcsr(before | 0x8040); }
    ~DenormalsAreZero() { _mm_setcsr(before); }
};
inline VecF add_tile_products(VecF a, VecF b, VecF sum) {
    return fma(a, b, sum);
}
inline VecF add_tile_sums(VecF a, VecF b) {
    return a + b;
}
#endif

// A vector's lanes hold four steps of each of kStreams rows of w, which are read in parallel from distant parts of w
// (see linear/few_rows_cpu.cpp).
constexpr int kSteps = 4, kStreams = kLanes / kSteps;

constexpr int64_t kAheadBytes = 4096; // into L2

constexpr int64_t kStepElements = kTileStep<bf16>, kGroupElements = kSteps * kStepElements;

// Loads kSteps floats and repeats them for each stream.
inline VecF repeat_steps(const float *p) {
#if defined(__AVX512F__)
    return (VecF)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#else
    static_assert(kStreams == 1);
    return load(p);
#endif
}

// The sums of kSteps steps of kStreams rows of w, with each row of x.
template <int kM>
INFINI_ALWAYS_INLINE void multiply_steps(const bf16 *const (&w)[kStreams], int64_t at, const float *x,
                                         VecF (&sums)[kM]) {
    VecF even[kM] = {}, odd[kM] = {};
#pragma GCC unroll 16
    for (int first = 0; first < kTmmRows; first += kLanes) {
        VecF words[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
            words[lane] = load_raw(w[lane / kSteps] + at + lane % kSteps * kStepElements + 2 * first, Full{});
        }
        transpose(words);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            const VecF low = (VecF)((VecU)words[i] << 16), high = (VecF)((VecU)words[i] & 0xffff0000u);
#pragma GCC unroll 16
            for (int m = 0; m < kM; ++m, x += 2 * kSteps) {
                even[m] = add_tile_products(low, repeat_steps(x), even[m]);
                odd[m] = add_tile_products(high, repeat_steps(x + kSteps), odd[m]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
        sums[m] = add_tile_sums(even[m], odd[m]);
    }
}

// Packs x for multiply_steps: for kSteps steps, for each word of a step, for each row, the word's even elements and
// then its odd ones; zeros beyond k. element(m, i) is element i of row m.
template <int kM, typename Element> void spread_steps(const Element &element, int64_t k, float *x) {
    std::memset(x, 0, static_cast<size_t>(ceil_div(k, kGroupElements) * kGroupElements * kM) * sizeof(float));
    for (int64_t group = 0; group < k; group += kGroupElements, x += kGroupElements * kM) {
        for (int64_t lane = 0; lane < kSteps; ++lane) {
            const int64_t step = group + lane * kStepElements, left = k - step;
            for (int64_t i = 0; i < kStepElements && i < left; ++i) {
                for (int m = 0; m < kM; ++m) {
                    x[((i / 2 * kM + m) * 2 + i % 2) * kSteps + lane] = widen(element(m, step + i));
                }
            }
        }
    }
}

// Writes the sums of each step of kStreams rows of w. Row m of x gets vectors of kSteps per stream, from to[m * pitch]
// on.
template <int kM>
__attribute__((noinline)) void multiply_streams(const bf16 *const (&w)[kStreams], int64_t k, const float *x, float *to,
                                                int64_t pitch) {
    VecF sums[kM];
    const auto keep = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            store(to + m * pitch, sums[m]);
        }
        to += kLanes;
    };
    int64_t i = 0;
    for (; i + kGroupElements <= k; i += kGroupElements, x += kGroupElements * kM) {
#pragma GCC unroll 16
        for (int line = 0; line < kLanes; ++line) { // a step is one cache line
            __builtin_prefetch(reinterpret_cast<const char *>(w[line / kSteps] + i) + kAheadBytes +
                                   line % kSteps * kTmmRowBytes,
                               0, 2);
        }
        multiply_steps<kM>(w, i, x, sums);
        keep();
    }
    if (i < k) {
        alignas(64) bf16 last[kStreams][kGroupElements] = {};
        const bf16 *rows[kStreams];
        for (int s = 0; s < kStreams; ++s) {
            std::memcpy(last[s], w[s] + i, sizeof(bf16) * static_cast<size_t>(k - i));
            rows[s] = last[s];
        }
        multiply_steps<kM>(rows, 0, x, sums);
        keep();
    }
}

// Adds up the step sums in `steps` (rows `pitch` apart, `count` steps) of kLanes rows of each stream. Padding steps are
// left out although they are 0: a sum may be -0.
inline __attribute__((noinline)) void add_steps(const float *steps, int64_t count, int64_t pitch,
                                                VecF (&sums)[kStreams]) {
    for (int s = 0; s < kStreams; ++s) {
        sums[s] = VecF{};
    }
    for (int64_t i = 0; i < count; i += kSteps, steps += kLanes) {
        VecF of_rows[kLanes];
#pragma GCC unroll 16
        for (int row = 0; row < kLanes; ++row) {
            of_rows[row] = load(steps + row * pitch);
        }
        transpose(of_rows);
        for (int step = 0; step < kSteps && i + step < count; ++step) {
            for (int s = 0; s < kStreams; ++s) {
                sums[s] = add_tile_sums(sums[s], of_rows[s * kSteps + step]);
            }
        }
    }
}

// Passes results of kM rows of x and some columns to write(block, row, column, sums, lanes).
template <int kM, typename Write>
void write_columns(const Write &write, int64_t block, int64_t column, int64_t columns, const VecF (&sums)[kM]) {
    for (int m = 0; m < kM && columns > 0; ++m) {
        if (columns >= kLanes) {
            write(block, m, column, sums[m], Full{});
        } else {
            write(block, m, column, sums[m], static_cast<int>(columns));
        }
    }
}

// The floats that multiply_blocks_of_few_rows needs: the sums of all steps of kLanes rows of each stream.
template <int kM> int64_t step_floats(int64_t k) {
    return kLanes * kM * ceil_div(k, kGroupElements) * kLanes;
}

template <int kM> int64_t spread_floats(int64_t k) {
    return ceil_div(k, kGroupElements) * kGroupElements * kM;
}

// Computes blocks begin .. end-1 of y, in streams. block(i) has k adjacent in memory. `steps` has room for
// step_floats(k).
template <int kM, typename BlockOf, typename Write>
void multiply_blocks_of_few_rows(int64_t k, int64_t begin, int64_t end, const float *x, float *steps,
                                 const BlockOf &block, const Write &write) {
    const int64_t length = ceil_div(end - begin, kStreams), count = ceil_div(k, kStepElements);
    const int64_t pitch = ceil_div(k, kGroupElements) * kLanes;
    for (int64_t i = begin; i < begin + length; ++i) {
        for (int64_t column = 0; column < kPairRows; column += kLanes) {
            VecF sums[kM][kStreams];
            int64_t counts[kStreams];
            {
                const DenormalsAreZero scope;
                for (int64_t r = 0; r < kLanes; ++r) {
                    const bf16 *rows[kStreams];
                    // A stream without a block reads an existing one and drops the result.
                    for (int s = 0; s < kStreams; ++s) {
                        const bool there = i + s * length < end;
                        const auto w = block(there ? i + s * length : i);
                        counts[s] = there ? w.count - column : 0;
                        rows[s] = w.rows.data + (r < counts[s] ? column + r : 0) * w.rows.j_stride;
                    }
                    multiply_streams<kM>(rows, k, x, steps + r * kM * pitch, pitch);
                }
                for (int m = 0; m < kM; ++m) {
                    add_steps(steps + m * pitch, count, kM * pitch, sums[m]);
                }
            }
            for (int s = 0; s < kStreams; ++s) {
                VecF of_stream[kM];
                for (int m = 0; m < kM; ++m) {
                    of_stream[m] = sums[m][s];
                }
                write_columns(write, i + s * length, column, counts[s], of_stream);
            }
        }
    }
}

// Computes y of kM rows of x, of k elements, for `blocks` blocks of weights. block_of(i) is a block with k adjacent in
// memory; element(m, i) is element i of row m of x; write as in write_columns.
template <int kM, typename Element, typename BlockOf, typename Write>
void multiply_few_rows(int64_t k, int64_t blocks, const Element &element, const BlockOf &block_of, const Write &write) {
    const int64_t work = blocks * kPairRows * k * static_cast<int64_t>(sizeof(bf16));
    const int64_t threads = parallel_threads(blocks, work), own = step_floats<kM>(k), of_x = spread_floats<kM>(k);
    auto *const x = static_cast<float *>(cpu::scratch(static_cast<size_t>(of_x + threads * own) * sizeof(float)));
    spread_steps<kM>(element, k, x);
    parallel_for(threads, work, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part) {
            multiply_blocks_of_few_rows<kM>(k, blocks * part / threads, blocks * (part + 1) / threads, x,
                                            x + of_x + part * own, block_of, write);
        }
    });
}

// Calls body with m, at most kFewTileRows, as a compile-time constant.
template <typename Body> void with_few_rows(int64_t m, const Body &body) {
    static_assert(kFewTileRows == 2);
    if (m == 1) {
        body(std::integral_constant<int, 1>{});
    } else {
        body(std::integral_constant<int, 2>{});
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
