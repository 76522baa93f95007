// The sequences of a call of attention: their rows and keys, visibility, addresses, and the split into work tiles. No
// arithmetic on elements.
#pragma once

#include "attention.h"
#include "block_sizes.h"
#include "indices.h"
#include "tile_products.h"

namespace infini::INFINI_LEVEL {
namespace {

using attention::Args;

class Sequences {
protected:
    // element_bytes: of an element of q and out; cache_bytes: of K and V. products: null if there are no tiles.
    Sequences(const Args &args, int64_t element_bytes, int64_t cache_bytes, const attention::TileProducts *products)
        : a_(args), lens_(args.kv_lens), starts_(args.q_starts), tables_(args.block_tables),
          element_bytes_(element_bytes), cache_bytes_(cache_bytes), products_(products) {
        heads_ = a_.q.size(2), size_ = a_.q.size(3), kv_heads_ = a_.k.size(2);
        batch_ = a_.q_starts.dtype ? a_.q_starts.size(0) - 1 : a_.q.size(0);
        group_ = heads_ / kv_heads_;
        window_ = a_.window > 0 ? a_.window : INT64_MAX;
        for (int64_t b = 0; b < batch_; ++b) {
            const Sequence s = sequence(b);
            const int64_t pairs = (s.length - s.first_key) * kv_heads_ * size_;
            work_ += pairs * 2 * cache_bytes_ + pairs * s.rows * 4 / kFlopsPerByte;
            splits_ = s.splits > splits_ ? s.splits : splits_;
            row_blocks_ = s.row_blocks > row_blocks_ ? s.row_blocks : row_blocks_;
            row_limit_ = s.row_limit > row_limit_ ? s.row_limit : row_limit_;
            packs_values_ = packs_values_ || s.packs_values;
            any_tiled_ = any_tiled_ || s.tiled;
        }
        keys_first_ = a_.k.strides[2] > a_.k.strides[1];
    }

    // A sequence of the batch. The way it is computed, and so its bits, depend on these numbers alone.
    struct Sequence {
        int64_t length;      // its keys
        int64_t first_query; // in its batch entry of q and out, or in all of q
        int64_t queries;
        int64_t first_key;  // that a query sees
        int64_t rows;       // of a key head: row = query * group + head in the group
        int64_t row_blocks; // of kRowBlock rows
        int64_t row_limit;  // rows in the largest block
        int64_t splits;     // of the keys from first_key on
        bool dots;          // scores by dot products
        bool tiled;         // both products in tile registers
        int64_t key_block;  // keys at a time
        bool packs_values;
    };

    Sequence sequence(int64_t b) const {
        Sequence s;
        s.length = length(b);
        s.first_query = a_.q_starts.dtype ? starts_[b] : 0;
        s.queries = a_.q_starts.dtype ? starts_[b + 1] - s.first_query : a_.q.size(1);
        s.first_key = hidden(s, 0);
        s.rows = s.queries * group_;
        s.row_blocks = ceil_div(s.rows, kRowBlock);
        s.row_limit = s.rows < kRowBlock ? s.rows : kRowBlock;
        const int64_t splits = s.row_blocks == 1 ? ceil_div(s.length - s.first_key, kSplitKeys) : 1;
        s.splits = splits < 1 ? 1 : splits > kMaxSplits ? kMaxSplits : splits;
        s.dots = scores_by_dots(s.row_limit, element_bytes_);
        s.tiled = products_ != nullptr && s.row_limit > kDirectRows;
        s.key_block = s.dots ? dot_keys(cache_bytes_) : kKeyBlock;
        s.packs_values = s.row_limit > kDirectRows || size_ % kLanes != 0;
        return s;
    }

    int64_t length(int64_t b) const { return a_.kv_lens.dtype ? lens_[b] : a_.k.size(1); }

    // An entry of a sequence's block table.
    int64_t block_of(int64_t b, int64_t i) const {
        return tables_.at(b * a_.block_tables.strides[0] + i * a_.block_tables.strides[1]);
    }

    // The work of a thread at a time: one block of rows of some key heads against one split of the keys.
    struct WorkTile {
        int64_t b, split, kv_head, first_row, rows, begin, end; // rows 0: there is nothing to do
        Sequence s;
    };

    WorkTile unit_at(int64_t index, int64_t block) const {
        const int64_t groups = kv_heads_ / heads_together_;
        WorkTile u = {
            index / groups / splits_, index / groups % splits_, index % groups * heads_together_, 0, 0, 0, 0, {}};
        u.s = sequence(u.b);
        const Sequence &s = u.s;
        const bool untouched = s.length == 0 && a_.keeps_empty;
        if (u.split >= s.splits || block >= s.row_blocks || untouched) {
            return u;
        }
        u.first_row = block * kRowBlock;
        u.rows = s.rows - u.first_row < kRowBlock ? s.rows - u.first_row : kRowBlock;
        const int64_t size = round_up(ceil_div(s.length - s.first_key, s.splits), kKeyBlock);
        u.begin = hidden(s, u.first_row) + u.split * size;
        const int64_t seen = visible(s, u.first_row + u.rows - 1);
        u.end = s.splits > 1 && u.begin + size < seen ? u.begin + size : seen;
        return u;
    }

    // How many key heads a work tile has: a divisor of all that balances the threads.
    int64_t together(int64_t pieces, int64_t threads) const {
        if (row_blocks_ > 1 || packs_values_) {
            return 1;
        }
        const int64_t head_bytes = 2 * dot_keys(cache_bytes_) * size_ * cache_bytes_;
        int64_t heads = kv_heads_ < kMaxTogether ? kv_heads_ : kMaxTogether;
        for (; heads > 1; --heads) {
            const int64_t units = pieces / heads;
            if (kv_heads_ % heads == 0 && heads * head_bytes <= kTogetherBytes &&
                (units % threads == 0 || units >= 8 * threads)) {
                break;
            }
        }
        return heads;
    }

    // How many keys a row of the sequence sees, those before its window included.
    int64_t visible(const Sequence &s, int64_t row) const {
        const int64_t seen = a_.causal ? s.length - s.queries + row / group_ + 1 : s.length;
        return seen < 0 ? 0 : seen;
    }

    // How many of these are before its window.
    int64_t hidden(const Sequence &s, int64_t row) const {
        const int64_t seen = visible(s, row);
        return seen > window_ ? seen - window_ : 0;
    }

    // The offset of a row of (sequence, key head) in q or out.
    int64_t offset(const TensorView &view, int64_t b, const Sequence &s, int64_t kv_head, int64_t row) const {
        return (a_.q_starts.dtype ? 0 : b) * view.strides[0] + (s.first_query + row / group_) * view.strides[1] +
               (kv_head * group_ + row % group_) * view.strides[2];
    }

    // The addresses of the s.key_block keys from `key` on; beyond the sequence's last key, the last one's.
    template <typename E>
    void locate(int64_t b, const Sequence &s, int64_t kv_head, int64_t key, const E **k_rows, const E **v_rows) const {
        const bool paged = a_.block_tables.dtype != INFINI_DTYPE_INVALID;
        const auto *k_head = a_.k.template as<const E>() + kv_head * a_.k.strides[2];
        const auto *v_head = a_.v.template as<const E>() + kv_head * a_.v.strides[2];
        const int64_t k_stride = a_.k.strides[1], v_stride = a_.v.strides[1];
        const int64_t block_size = paged ? a_.k.size(1) : s.length;
        key = key < s.length ? key : s.length - 1;
        int64_t block = key / block_size, first = key % block_size;
        for (int64_t done = 0; done < s.key_block; ++block, first = 0) {
            const int64_t index = paged ? block_of(b, block) : b;
            const E *k = k_head + index * a_.k.strides[0] + first * k_stride;
            const E *v = v_head + index * a_.v.strides[0] + first * v_stride;
            int64_t n = s.key_block - done;
            n = n < block_size - first ? n : block_size - first;
            n = n < s.length - key ? n : s.length - key;
            for (int64_t i = 0; i < n; ++i) {
                k_rows[done + i] = k + i * k_stride;
                v_rows[done + i] = v + i * v_stride;
            }
            done += n;
            key += n;
            for (; key == s.length && done < s.key_block; ++done) {
                k_rows[done] = k + (n - 1) * k_stride;
                v_rows[done] = v + (n - 1) * v_stride;
            }
        }
    }

    // For each block of the cache, calls body(scales of its first key, their stride, number of keys).
    template <typename Body>
    void each_scale_block(const TensorView &scales, int64_t b, int64_t kv_head, int64_t key, int64_t keys,
                          const Body &body) const {
        const int64_t block_size = a_.k.size(1), *strides = scales.strides;
        for (int64_t n; keys > 0; keys -= n, key += n) {
            const int64_t first = key % block_size;
            n = keys < block_size - first ? keys : block_size - first;
            const int64_t block = block_of(b, key / block_size);
            body(scales.as<const float>() + block * strides[0] + first * strides[1] + kv_head * strides[2], strides[1],
                 n);
        }
    }

    const Args &a_;
    const Indices lens_, starts_, tables_;
    const int64_t element_bytes_, cache_bytes_;
    const attention::TileProducts *const products_;
    int64_t batch_, heads_, size_, kv_heads_;
    int64_t group_;          // query heads of a key head
    int64_t window_;         // of keys; without one the largest number
    int64_t row_blocks_ = 0; // the largest of all sequences, as the two below
    int64_t row_limit_ = 0;
    int64_t splits_ = 1;
    int64_t heads_together_ = 1; // key heads of a unit
    bool packs_values_ = false;  // whether any sequence does
    bool any_tiled_ = false;     // likewise
    bool keys_first_;            // the keys of one head lie closer in memory than the heads of one key
    int64_t work_ = 0;           // in bytes of traffic that would take as long
};

} // namespace
} // namespace infini::INFINI_LEVEL
