// A few rows of x times weights of bfloat16 in vector registers, with the bits of tile_product.h: a row has them beside
// any others, and alone it is not held up by the tiles' loads, of which few are under way at once.
// The order is that of TDPBF16PS: in a step of 32 elements of k the even ones and the odd ones by themselves, then their
// two sums together; these are added from the first step on. Denormals count as zero.
// A lane has a step, so that a row of w is read from one end to the other, a KiB at a time, and transposed; its steps are
// added once those of kLanes rows are there.
// Limit: memory bandwidth of w. A KiB of it takes 64 shuffles, 32 instructions that part pairs and 32 multiply-adds for
// each row of x: 64 cycles with one row and 112 with four where two vectors a cycle go through; 40 and 23 GB/s at 2.5 GHz.
#pragma once

#include "parallel.h"
#include "scratch.h"
#include "tile_product.h"

namespace infini::INFINI_LEVEL {
namespace {

// Rows of x up to which this is used.
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
// The thread's vector arithmetic for a scope: MXCSR's FTZ and DAZ. What computes in it must not be inlined, for the
// compiler moves arithmetic across.
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

// Rows of w that are read side by side, from far parts of it: linear/few_rows_cpu.cpp.
constexpr int kStreams = 4;

constexpr int64_t kStepElements = kTileStep<bf16>, kGroupElements = kLanes * kStepElements;

// The sums of kLanes steps of a row of w with each row of x.
template <int kM> INFINI_ALWAYS_INLINE void multiply_steps(const bf16 *w, const float *x, VecF (&sums)[kM]) {
    VecF even[kM] = {}, odd[kM] = {};
#pragma GCC unroll 16
    for (int first = 0; first < kTmmRows; first += kLanes) {
        VecF words[kLanes];
        load_transposed(w + 2 * first, kStepElements, kLanes, Full{}, words);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            const VecF low = (VecF)((VecU)words[i] << 16), high = (VecF)((VecU)words[i] & 0xffff0000u);
#pragma GCC unroll 16
            for (int m = 0; m < kM; ++m, x += 2 * kLanes) {
                even[m] = add_tile_products(low, load(x), even[m]);
                odd[m] = add_tile_products(high, load(x + kLanes), odd[m]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
        sums[m] = add_tile_sums(even[m], odd[m]);
    }
}

// x as multiply_steps reads it: for kLanes steps, for each word of a step, for each row, the even elements of the word and
// then the odd ones. Behind k are zeros. element(m, i) is that of row m.
template <int kM, typename Element> void spread_steps(const Element &element, int64_t k, float *x) {
    std::memset(x, 0, static_cast<size_t>(ceil_div(k, kGroupElements) * kGroupElements * kM) * sizeof(float));
    for (int64_t group = 0; group < k; group += kGroupElements, x += kGroupElements * kM) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int64_t step = group + lane * kStepElements, left = k - step;
            for (int64_t i = 0; i < kStepElements && i < left; ++i) {
                for (int m = 0; m < kM; ++m) {
                    x[((i / 2 * kM + m) * 2 + i % 2) * kLanes + lane] = widen(element(m, step + i));
                }
            }
        }
    }
}

// The sums of each step of kStreams rows of w: of the s-th and row m of x, to[(s * kM + m) * pitch] and those behind it.
template <int kM>
__attribute__((noinline)) void multiply_streams(const bf16 *const (&w)[kStreams], int64_t k, const float *x, float *to,
                                                int64_t pitch) {
    const auto multiply = [&](const bf16 *from, int s) __attribute__((always_inline)) {
        VecF sums[kM];
        multiply_steps<kM>(from, x, sums);
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            store(to + (s * kM + m) * pitch, sums[m]);
        }
    };
    int64_t i = 0;
    for (; i + kGroupElements <= k; i += kGroupElements, x += kGroupElements * kM, to += kLanes) {
        for (int s = 0; s < kStreams; ++s) {
            multiply(w[s] + i, s);
        }
    }
    for (int s = 0; s < kStreams && i < k; ++s) {
        alignas(64) bf16 last[kGroupElements] = {};
        std::memcpy(last, w[s] + i, sizeof(bf16) * static_cast<size_t>(k - i));
        multiply(last, s);
    }
}

// The sums of kLanes rows of w, of whose `count` steps are the sums in `steps`, rows `pitch` apart. Not what is behind
// them, though it is zero: a sum may be -0.
inline __attribute__((noinline)) VecF add_steps(const float *steps, int64_t count, int64_t pitch) {
    VecF sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
        VecF of_rows[kLanes];
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
            of_rows[lane] = load(steps + lane * pitch + i);
        }
        transpose(of_rows);
        for (int step = 0; step < kLanes && i + step < count; ++step) {
            sum = add_tile_sums(sum, of_rows[step]);
        }
    }
    return sum;
}

// Results of kM rows of x and some columns, which write(block, row, column, sums, lanes) takes.
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

// The blocks begin .. end-1 of y, in streams: block(i) is one, k adjacent in memory. `steps`: room for step_floats.
template <int kM, typename BlockOf, typename Write>
void multiply_blocks_of_few_rows(int64_t k, int64_t begin, int64_t end, const float *x, float *steps,
                                 const BlockOf &block, const Write &write) {
    const int64_t length = ceil_div(end - begin, kStreams), count = ceil_div(k, kStepElements);
    const int64_t pitch = ceil_div(k, kGroupElements) * kLanes;
    for (int64_t i = begin; i < begin + length; ++i) {
        for (int64_t column = 0; column < kPairRows; column += kLanes) {
            VecF sums[kStreams][kM];
            int64_t counts[kStreams];
            {
                const DenormalsAreZero scope;
                for (int64_t r = 0; r < kLanes; ++r) {
                    const bf16 *rows[kStreams];
                    for (int s = 0; s < kStreams; ++s) { // where there is none, some other one
                        const bool there = i + s * length < end;
                        const auto w = block(there ? i + s * length : i);
                        counts[s] = there ? w.count - column : 0;
                        rows[s] = w.rows.data + (r < counts[s] ? column + r : 0) * w.rows.j_stride;
                    }
                    multiply_streams<kM>(rows, k, x, steps + r * kStreams * kM * pitch, pitch);
                }
                for (int s = 0; s < kStreams; ++s) {
                    for (int m = 0; m < kM; ++m) {
                        sums[s][m] = add_steps(steps + (s * kM + m) * pitch, count, kStreams * kM * pitch);
                    }
                }
            }
            for (int s = 0; s < kStreams; ++s) {
                write_columns(write, i + s * length, column, counts[s], sums[s]);
            }
        }
    }
}

template <int kM> int64_t step_floats(int64_t k) {
    return kStreams * kM * kLanes * ceil_div(k, kGroupElements) * kLanes;
}

template <int kM> int64_t spread_floats(int64_t k) {
    return ceil_div(k, kGroupElements) * kGroupElements * kM;
}

// y of kM rows of x, of k elements, for `blocks` blocks of weights: block_of(i) is one, k adjacent in memory.
// element(m, i) is that of row m of x; write as in write_columns.
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
