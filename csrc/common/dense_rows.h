// DenseRows: the rows of several tensors of any strides, for kernels that need stride 1 within a row. Tensors whose
// innermost stride is 1 are accessed in place. Rows of the others are copied to scratch memory, a group at a time, and
// outputs are copied back. So strides cannot change a result's bits.
#pragma once

#include <cstring>

#include "row_iterator.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Swaps the off-diagonal quarters of each block of 2 * kHalf rows and lanes. Applied for every size, this transposes.
template <int kHalf, int... kLane>
inline void swap_quarters(VecU (&rows)[kLanes], std::integer_sequence<int, kLane...> all) {
    for (int i = 0; i < kLanes; ++i) {
        if ((i & kHalf) == 0) {
            const VecU a = rows[i], b = rows[i + kHalf];
            rows[i] = __builtin_shufflevector(a, b, (kLane & kHalf ? kLane - kHalf + kLanes : kLane)...);
            rows[i + kHalf] = __builtin_shufflevector(a, b, (kLane & kHalf ? kLane + kLanes : kLane + kHalf)...);
        }
    }
    if constexpr (kHalf > 1) {
        swap_quarters<kHalf / 2>(rows, all);
    }
}

// to[j * to_step + i] = from[i * from_step + j] for i and j below kLanes.
template <typename E> void transpose_block(E *to, int64_t to_step, const E *from, int64_t from_step) {
    typedef E Row __attribute__((vector_size(kLanes * sizeof(E))));
    VecU rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        Row row;
        std::memcpy(&row, from + i * from_step, sizeof row);
        rows[i] = __builtin_convertvector(row, VecU);
    }
    swap_quarters<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>{});
    for (int i = 0; i < kLanes; ++i) {
        const Row row = __builtin_convertvector(rows[i], Row);
        std::memcpy(to + i * to_step, &row, sizeof row);
    }
}

// dense[r * pitch + i] = strided[at[r] + i * stride]; with kBack the opposite direction.
template <bool kBack, typename E>
void copy_rows(E *dense, int64_t pitch, E *strided, const int64_t *at, int rows, int64_t stride, int64_t n) {
    bool adjacent = true;
    for (int r = 1; r < rows; ++r) {
        adjacent = adjacent && at[r] == at[0] + r;
    }
    // Adjacent rows are transposed in blocks, as far as they fill whole blocks.
    const int block_rows = adjacent ? rows / kLanes * kLanes : 0;
    const int64_t block_columns = n / kLanes * kLanes;
    for (int64_t i = 0; i < n; ++i) {
        const bool in_blocks = i < block_columns;
        if (in_blocks && i % kLanes == 0) {
            for (int r = 0; r < block_rows; r += kLanes) {
                E *const there = dense + r * pitch + i, *const here = strided + at[0] + r + i * stride;
                kBack ? transpose_block(here, stride, there, pitch) : transpose_block(there, pitch, here, stride);
            }
        }
        for (int r = in_blocks ? block_rows : 0; r < rows; ++r) {
            if constexpr (kBack) {
                strided[at[r] + i * stride] = dense[r * pitch + i];
            } else {
                dense[r * pitch + i] = strided[at[r] + i * stride];
            }
        }
    }
}

template <int kTensors> class DenseRows {
public:
    // All views have the shape of views[0], except for the last dimension. The first `outputs` of them are written.
    DenseRows(const TensorView *const (&views)[kTensors], int outputs) : rows_(views), outputs_(outputs) {
        int64_t row_bytes = 0;
        for (int t = 0; t < kTensors; ++t) {
            Tensor &tensor = tensors_[t];
            tensor.data = static_cast<char *>(views[t]->data);
            tensor.element = static_cast<int64_t>(size_of(views[t]->dtype));
            tensor.n = views[t]->size(-1);
            tensor.stride = views[t]->stride(-1);
            if (tensor.n > 1 && tensor.stride != 1) {
                // An odd number of cache lines, so that the rows of a group do not map to the same cache sets.
                tensor.pitch = (tensor.n * tensor.element + 127) / 128 * 128 + 64;
                row_bytes += tensor.pitch;
            }
        }
        if (row_bytes > 0) {
            const int64_t fitting = kGroupBytes / row_bytes;
            group_ = static_cast<int>(fitting < 1 ? 1 : fitting < kGroup ? fitting : kGroup);
            group_ = group_ < kLanes ? group_ : group_ / kLanes * kLanes;
            scratch_bytes_ = group_ * row_bytes;
        }
    }

    int64_t count() const { return rows_.count(); }

    // The scratch memory that visit needs; 0 where all rows are dense.
    int64_t scratch_bytes() const { return scratch_bytes_; }

    // Calls body(rows) for rows begin .. end-1 in order; rows[t] is where tensor t's row starts, of stride 1.
    template <typename Body> void visit(int64_t begin, int64_t end, void *scratch, const Body &body) const {
        if (scratch_bytes_ == 0) {
            rows_.visit(begin, end, [&](const int64_t *at) {
                void *rows[kTensors];
                for (int t = 0; t < kTensors; ++t) {
                    rows[t] = tensors_[t].data + at[t] * tensors_[t].element;
                }
                body(rows);
            });
            return;
        }
        int64_t at[kTensors][kGroup];
        int held = 0;
        rows_.visit(begin, end, [&](const int64_t *offsets) {
            for (int t = 0; t < kTensors; ++t) {
                at[t][held] = offsets[t];
            }
            if (++held == group_) {
                visit_group(at, held, static_cast<char *>(scratch), body);
                held = 0;
            }
        });
        visit_group(at, held, static_cast<char *>(scratch), body);
    }

private:
    // Rows that are copied together: adjacent ones share cache lines and pages, and all fit into the L2 cache.
    static constexpr int kGroup = 128;
    static constexpr int64_t kGroupBytes = 512 * 1024;

    struct Tensor {
        char *data = nullptr;
        int64_t element = 0, n = 0, stride = 0;
        int64_t pitch = 0; // from row to row in scratch memory, in bytes; 0: dense
    };

    template <typename Body>
    void visit_group(const int64_t (&at)[kTensors][kGroup], int held, char *scratch, const Body &body) const {
        char *dense[kTensors];
        for (int t = 0; t < kTensors; ++t) {
            dense[t] = scratch;
            scratch += group_ * tensors_[t].pitch;
            if (tensors_[t].pitch > 0 && t >= outputs_) {
                copy<false>(tensors_[t], dense[t], at[t], held);
            }
        }
        for (int r = 0; r < held; ++r) {
            void *rows[kTensors];
            for (int t = 0; t < kTensors; ++t) {
                const Tensor &tensor = tensors_[t];
                rows[t] = tensor.pitch > 0 ? dense[t] + r * tensor.pitch : tensor.data + at[t][r] * tensor.element;
            }
            body(rows);
        }
        for (int t = 0; t < outputs_; ++t) {
            if (tensors_[t].pitch > 0) {
                copy<true>(tensors_[t], dense[t], at[t], held);
            }
        }
    }

    template <bool kBack> static void copy(const Tensor &tensor, char *dense, const int64_t *at, int rows) {
        if (tensor.element == 2) {
            copy_rows<kBack>(reinterpret_cast<Half *>(dense), tensor.pitch / 2, reinterpret_cast<Half *>(tensor.data),
                             at, rows, tensor.stride, tensor.n);
        } else {
            copy_rows<kBack>(reinterpret_cast<Word *>(dense), tensor.pitch / 4, reinterpret_cast<Word *>(tensor.data),
                             at, rows, tensor.stride, tensor.n);
        }
    }

    // Unsigned integers of each element size that may alias the elements' own types.
    typedef uint16_t __attribute__((may_alias)) Half;
    typedef uint32_t __attribute__((may_alias)) Word;

    RowIterator<kTensors> rows_;
    Tensor tensors_[kTensors];
    int outputs_;
    int group_ = 1;
    int64_t scratch_bytes_ = 0;
};

} // namespace
} // namespace infini::INFINI_LEVEL
