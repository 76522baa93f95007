// Stages of weight_stream.cuh: copies 128 bytes of each of the 16 rows of a band of the weight to a slot of shared
// memory, followed by the scales and zeros of their groups; and loads the matching part of x. If addresses are aligned
// and a stage is whole, nothing is checked.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/keep_in_register.cuh"
#include "cuda/vectors.cuh"
#include "weight_stream_problem.cuh"

namespace infini::weight_stream {

constexpr int kStageBytes = 128;          // per row of the weight
constexpr int kChunks = kStageBytes / 16; // 16-byte chunks per row

// place(row, chunk) is the offset of a 16-byte chunk of a row in a slot, with kPitch bytes between rows. Writes of
// chunks, and reads of 4 or 16 bytes by (row, column) = (lane / 4, lane % 4), have no bank conflicts.
template <typename F> constexpr int kPitch = F::kReadBytes == 4 ? kStageBytes + 16 : kStageBytes;

template <typename F> __device__ __forceinline__ int place(int row, int chunk) {
    static_assert(F::kReadBytes == 4 || F::kReadBytes == 16);
    const int turn = F::kReadBytes == 4 ? 0 : (row & 1) << 2 | (row >> 1 & 3);
    return row * kPitch<F> + (chunk ^ turn) * 16;
}

// The offset of the row 4 * i below the one at offset `first`.
template <typename F> __device__ __forceinline__ int place_below(int first, int i) {
    return (F::kReadBytes == 4 || i % 2 == 0 ? first : first ^ 2 * 16) + i * 4 * kPitch<F>;
}

// The layout of a stage's scales and zeros in its slot: [scales, zeros][kBandRows][pitch bytes], of their dtype.
struct GroupSlots {
    infiniDtype_t dtype = INFINI_DTYPE_INVALID;
    int value = 0;      // bytes per value
    int pitch = 0;      // bytes per row of a stage, which has 2 to 8 values
    int row_bytes = 0;  // bytes of all groups of a row
    int copy_bytes = 0; // bytes per copy: 4, 8 or 16; 0: not aligned
};

template <typename F> struct Stage {
    static constexpr int kElements = kStageBytes * 8 / F::kBits; // elements of k
    static constexpr int kSteps = kElements / (4 * F::kLane);
    static constexpr int kWeightBytes = kBandRows * kPitch<F>;

    template <typename X> static GroupSlots groups(const Problem<X> &a) {
        GroupSlots slots;
        if constexpr (F::kGrouped) {
            slots.dtype = a.scales.dtype;
            slots.value = static_cast<int>(size_of(a.scales.dtype));
            slots.pitch = (kElements >> a.group_shift) * slots.value;
            slots.row_bytes = static_cast<int>(a.k >> a.group_shift) * slots.value;
            const int bytes = slots.pitch < 16 ? slots.pitch : 16;
            const auto fits = [&](const FloatVector &numbers) {
                return reinterpret_cast<uintptr_t>(numbers.data) % bytes == 0 &&
                       (a.weight[0].n <= 1 || numbers.stride * slots.value % bytes == 0);
            };
            slots.copy_bytes = fits(a.scales) && fits(a.zeros) ? bytes : 0;
        }
        return slots;
    }
    static int slot_bytes(const GroupSlots &slots) { // rounded up to multiples of 16
        if constexpr (F::kGrouped) {
            return kWeightBytes + (F::kZeros ? 2 : 1) * kBandRows * slots.pitch;
        }
        return kWeightBytes;
    }
};

// ---- weights ----

// Reads 16 bytes of a row of the weight, or the `left` bytes that exist.
__device__ __forceinline__ cuda::Vector<uint32_t, 4> read_chunk(const Weight &w, const unsigned char *row,
                                                                int64_t first, int left, int size) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        if (size == 2) {
            if (i < left) {
                const auto value = *reinterpret_cast<const uint16_t *>(row + (first + i) / 2 * w.element);
                words[i / 4] |= static_cast<uint32_t>(value) << i % 4 * 8;
            }
        } else {
#pragma unroll
            for (int j = i; j < i + 2; ++j) {
                words[j / 4] |= j < left ? static_cast<uint32_t>(row[(first + j) * w.element]) << j % 4 * 8 : 0u;
            }
        }
    }
    return {{words[0], words[1], words[2], words[3]}};
}

// A lane's share of the copies of a stage: one chunk of every fourth row.
template <typename F> class WeightCopies {
public:
    __device__ __forceinline__ explicit WeightCopies(int lane)
        : row_(lane / kChunks), chunk_(lane % kChunks), to_(place<F>(row_, chunk_)) {
        cuda::keep_in_register(to_);
    }

    // Turns to the band from row first_row of the weight on.
    __device__ __forceinline__ void move_to(const Weight &w, int64_t first_row) {
        from_ = w.data + (first_row + row_) * w.row + chunk_ * 16;
        cuda::keep_in_register(from_);
    }

    // Starts the copies of a whole stage of a band that has all its rows.
    __device__ __forceinline__ void start(const Weight &w, int stage, unsigned char *slot) const {
        const unsigned char *const from = from_ + static_cast<int64_t>(stage) * kStageBytes;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            cuda::async_copy(slot + place_below<F>(to_, i), from + i * kRowStep * w.row);
        }
    }

    // The same for any stage: k may end in it, rows may be missing, the weight may be unaligned.
    __device__ __forceinline__ void start_any(const Weight &w, int64_t first_row, int64_t row_bytes, int stage,
                                              unsigned char *slot) const {
        const int64_t byte = static_cast<int64_t>(stage) * kStageBytes + chunk_ * 16;
        const int there = static_cast<int>(row_bytes - byte < 16 ? (row_bytes > byte ? row_bytes - byte : 0) : 16);
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i) {
            const int64_t row = first_row + row_ + i * kRowStep;
            const int left = row < w.n ? there : 0;
            const unsigned char *const from = w.data + (left > 0 ? row * w.row : 0);
            unsigned char *const to = slot + place_below<F>(to_, i);
            if (w.whole) {
                cuda::async_copy(to, left > 0 ? from + byte : w.data, left);
            } else {
                *reinterpret_cast<cuda::Vector<uint32_t, 4> *>(to) = read_chunk(w, from, byte, left, F::kElementBytes);
            }
        }
    }

private:
    static constexpr int kRowStep = 32 / kChunks, kCopies = kBandRows / kRowStep;
    static_assert(kRowStep == 4);
    const int row_, chunk_;
    int to_;
    const unsigned char *from_ = nullptr;
};

// ---- scales and zeros of groups ----

// A lane's share of the copies of scales or zeros: those of one row.
class GroupCopies {
public:
    __device__ __forceinline__ explicit GroupCopies(int lane) : lane_(lane) {}

    // Turns to the band from row first_row of the weight on.
    template <typename X>
    __device__ __forceinline__ void move_to(const Problem<X> &a, const Weight &w, const GroupSlots &slots,
                                            int64_t first_row) {
        const FloatVector &numbers = lane_ < kBandRows ? a.scales : a.zeros;
        const int64_t row = first_row + lane_ % kBandRows, last = w.n - 1;
        from_ =
            static_cast<const unsigned char *>(numbers.data) + (row < last ? row : last) * numbers.stride * slots.value;
    }

    // Starts the copies of a whole stage if they are aligned; `slot` points to its scales.
    __device__ __forceinline__ void start(const GroupSlots &slots, bool zeros, int stage, unsigned char *slot) const {
        if (lane_ >= kBandRows && !zeros) {
            return;
        }
        const unsigned char *const from = from_ + static_cast<int64_t>(stage) * slots.pitch;
        unsigned char *const to = slot + lane_ * slots.pitch;
        if (slots.copy_bytes == 4) {
            cuda::async_copy<4>(to, from);
        } else if (slots.copy_bytes == 8) {
            cuda::async_copy<8>(to, from);
        } else {
            cuda::async_copy<16>(to, from);
            if (slots.pitch > 16) {
                cuda::async_copy<16>(to + 16, from + 16);
            }
        }
    }

    // The same for any stage: two bytes at a time, with zeros beyond the last group.
    __device__ __forceinline__ void start_any(const GroupSlots &slots, bool zeros, int stage,
                                              unsigned char *slot) const {
        if (lane_ >= kBandRows && !zeros) {
            return;
        }
        const int first = stage * slots.pitch;
#pragma unroll 1
        for (int at = 0; at < slots.pitch; at += 2) {
            *reinterpret_cast<uint16_t *>(slot + lane_ * slots.pitch + at) =
                first + at < slots.row_bytes ? *reinterpret_cast<const uint16_t *>(from_ + first + at) : uint16_t{0};
        }
    }

private:
    const int lane_;
    const unsigned char *from_ = nullptr;
};

// The scales of a lane's two rows of the weight.
struct GroupScales {
    float scale[2], zero[2];
};

template <typename T, bool kZeros>
__device__ __forceinline__ GroupScales read_scales(const unsigned char *at, int pitch) {
    GroupScales scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        scales.scale[i] = cuda::widen(*reinterpret_cast<const T *>(at + i * 8 * pitch));
        scales.zero[i] = kZeros ? cuda::widen(*reinterpret_cast<const T *>(at + (kBandRows + i * 8) * pitch)) : 0.0f;
    }
    return scales;
}

// at: where the first row's scale is in the slot.
template <bool kZeros>
__device__ __forceinline__ GroupScales read_scales(const GroupSlots &slots, const unsigned char *at) {
    switch (slots.dtype) {
    case INFINI_DTYPE_BF16:
        return read_scales<bf16, kZeros>(at, slots.pitch);
    case INFINI_DTYPE_F16:
        return read_scales<f16, kZeros>(at, slots.pitch);
    default:
        return read_scales<float, kZeros>(at, slots.pitch);
    }
}

// ---- x ----

// Loads a lane's part of x for one step: elements from `from` on, of which `all_left` exist. kWhole: all exist and are
// aligned.
template <bool kWhole, typename X, int kRegisters>
__device__ __forceinline__ void load_x(uint32_t (&out)[kRegisters], const unsigned char *from, int64_t all_left) {
    const X *const x = reinterpret_cast<const X *>(from);
    constexpr int kPart = kRegisters < 4 ? kRegisters : 4, kInRegister = 4 / sizeof(X);
    if constexpr (kWhole) {
#pragma unroll
        for (int i = 0; i < kRegisters; i += kPart) {
            const auto part = *reinterpret_cast<const cuda::Vector<uint32_t, kPart> *>(x + i * kInRegister);
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                out[i + j] = part.values[j];
            }
        }
    } else {
        constexpr int kElements = kRegisters * kInRegister;
        const int left = static_cast<int>(all_left < kElements ? all_left : kElements);
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            out[i] = 0;
#pragma unroll
            for (int j = 0; j < kInRegister; ++j) {
                if (i * kInRegister + j < left) {
                    uint32_t bits;
                    if constexpr (sizeof(X) == 2) {
                        bits = x[i * kInRegister + j].bits;
                    } else {
                        bits = static_cast<uint8_t>(x[i * kInRegister + j]);
                    }
                    out[i] |= bits << (j * 8 * static_cast<int>(sizeof(X)));
                }
            }
        }
    }
}

} // namespace infini::weight_stream
