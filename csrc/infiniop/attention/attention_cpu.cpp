// The CPU kernel of attention: online softmax over blocks of keys. All query heads of a key head are rows of one
// matrix, so K and V are read once for them; with few rows (decode) they are read in place, through the keys'
// addresses. K and V of int8 are widened in registers; a key's scales are applied to its scores and its probabilities.
// Many rows of bfloat16 are multiplied in tile registers at the level avx512_amx; the rest is identical.
// Limits: decode reads K and V once (memory bandwidth); prefill does 4 flops for each visible (row, key, column).
#include "attention.h"
#include "kv_prefetcher.h"
#include "dot_products.h"
#include "packing.h"
#include "level_types.h"
#include "parallel.h"
#include "scores.h"
#include "scratch.h"
#include "sequences.h"
#include "block_sizes.h"
#include "byte_digits.h"
#include "tile_blocks.h"
#include "register_tiles.h"

#include <cmath>
#include <limits>
#include <type_traits>

namespace infini::INFINI_LEVEL {
namespace {

// T: the element type of q and out. E: the element type of K and V.
template <typename T, typename E> class Attention : Sequences {
    using P = typename Packed<T>::Type;
    using D = typename PackedForDots<T, E>::Type; // of the size of P
    static constexpr bool kScaled = std::is_same_v<E, int8_t>;
    // The packed rows, and rows of scores, of one row of q if scores are dot products.
    static constexpr int64_t kParts = kByteDigits<T, E> ? kDigits : 1;
    static constexpr bool kTiled = std::is_same_v<T, bf16>; // if there are tile registers

public:
    explicit Attention(const Args &args)
        : Sequences(args, sizeof(T), sizeof(E), kTiled ? attention::tile_products() : nullptr) {
        depth_ = ceil_div(size_, kElements<P>);
        columns_ = packed_columns<P>(size_);
        width_ = round_up(size_, kTileColumns);
        rows_ = row_limit_ + (kParts - 1) * kMaxDotRows;
        row_bytes_ = columns_ * static_cast<int64_t>(sizeof(P));
        if (any_tiled_) {
            width_ = round_up(width_, attention::kTileSide);
            rows_ = round_up(rows_, attention::kTileSide);
            row_bytes_ = row_bytes_ > tile_row_bytes(size_) ? row_bytes_ : tile_row_bytes(size_);
        }
        scale_ = static_cast<float>(a_.scale);
        softcap_ = static_cast<float>(a_.softcap);
        cap_factor_ = attention::cap_factor(a_);
        for (int i = 0; i < 4; ++i) {
            mask_strides_[i] = a_.mask.shape[i] == 1 ? 0 : a_.mask.strides[i];
        }
    }

    void run() {
        const int64_t pieces = batch_ * kv_heads_ * splits_;
        const int64_t limit = omp_get_max_threads();
        heads_together_ = together(pieces, limit);
        const int64_t units = pieces / heads_together_ * row_blocks_, workers = units < limit ? units : limit;
        // All memory is allocated here: no exception may leave the parallel region.
        const int64_t partial_floats = splits_ > 1 ? pieces * row_limit_ * (width_ + 2) : 0;
        const int64_t partial_bytes = round_up(partial_floats * 4, 64);
        auto *memory =
            static_cast<char *>(cpu::scratch(static_cast<size_t>(partial_bytes + workers * Workspace::bytes(*this))));
        partial_out_ = reinterpret_cast<float *>(memory);
        partial_sums_ = partial_out_ + pieces * row_limit_ * width_;
        // The heads of a split are adjacent in memory, often in the same page or the next one: if there are many units,
        // one worker takes them.
        const int64_t taken = heads_together_ == 1 && units >= 8 * workers * kv_heads_ ? kv_heads_ : 1;
        int64_t next = 0;
        weight_reading(); // throws for a wrong setting, which no parallel region may
        parallel_for(workers, work_, [&](int64_t begin, int64_t) {
            const ConfiguredTiles configured(any_tiled_ ? products_ : nullptr);
            const Workspace space(*this, memory + partial_bytes + begin * Workspace::bytes(*this));
            // Units differ in work (causal masks, lengths): each worker takes the next ones when it is done.
            int64_t unit = 0, end = 0;
            const auto take = [&](WorkTile &u) {
                do {
                    if (unit == end) {
                        unit = __atomic_fetch_add(&next, taken, __ATOMIC_RELAXED);
                        end = unit + taken;
                    }
                    if (unit >= units) {
                        return false;
                    }
                    u = unit_at(unit / row_blocks_, row_blocks_ - 1 - unit % row_blocks_);
                    ++unit;
                } while (u.rows == 0);
                return true;
            };
            // The next unit is known in advance: its first keys are prefetched at the end of the current unit.
            WorkTile unit_now, unit_then;
            for (bool any = take(unit_now); any; unit_now = unit_then) {
                any = take(unit_then);
                compute(unit_now, any ? &unit_then : nullptr, space);
            }
        });
        if (splits_ > 1) {
            const int64_t lines = batch_ * kv_heads_ * row_limit_;
            parallel_for(lines, partial_floats * 4, [&](int64_t begin, int64_t end) {
                for (int64_t line = begin; line < end; ++line) {
                    combine(line / row_limit_, line % row_limit_);
                }
            });
        }
    }

private:
    // The scratch memory of one worker.
    struct Workspace {
        P *q;             // [heads, rows, columns]
        P *k;             // panels of [columns][kTileColumns]
        float *v;         // panels of [kKeyBlock][kTileColumns]
        float *scores;    // [rows, kKeyBlock]
        float *out;       // [heads, rows, width]
        RowState *state;  // [heads, rows]
        const E **k_rows; // [2 * kKeyBlock]: the addresses of the keys of this block and the next one
        const E **v_rows;
        DigitScale *q_scales; // [heads, rows]: of rows packed as digits
        float *k_scales;      // [kKeyBlock]: of int8 keys
        float *v_scales;
        bf16 *wide;  // [kKeyBlock, size]: keys or values of int8, for tile registers
        char *parts; // [kPairedRows]: of probabilities, for tile registers

        static int64_t q_bytes(const Attention &a) { return round_up(a.heads_together_ * a.rows_ * a.row_bytes_, 64); }
        static int64_t k_bytes(const Attention &a) { return kKeyBlock * a.row_bytes_; }
        static int64_t v_bytes(const Attention &a) { return a.packs_values_ ? kKeyBlock * a.width_ * 4 : 0; }
        static int64_t scores_bytes(const Attention &a) { return a.rows_ * kKeyBlock * 4; }
        static int64_t out_bytes(const Attention &a) {
            return round_up(a.heads_together_ * a.rows_ * a.width_ * 4, 64);
        }
        static int64_t state_bytes(const Attention &a) {
            return round_up(a.heads_together_ * a.row_limit_ * static_cast<int64_t>(sizeof(RowState)), 64);
        }
        static int64_t q_scales_bytes(const Attention &a) {
            return kParts == 1
                       ? 0
                       : round_up(a.heads_together_ * a.row_limit_ * static_cast<int64_t>(sizeof(DigitScale)), 64);
        }
        static int64_t wide_bytes(const Attention &a) {
            return kScaled && a.any_tiled_ ? kKeyBlock * a.size_ * static_cast<int64_t>(sizeof(bf16)) : 0;
        }
        static int64_t parts_bytes(const Attention &a) { return a.any_tiled_ ? kPairedRows * kPartsBytes : 0; }
        static constexpr int64_t kRowsBytes = 2 * kKeyBlock * static_cast<int64_t>(sizeof(const E *));
        static constexpr int64_t kScalesBytes = kScaled ? kKeyBlock * 4 : 0;
        static int64_t bytes(const Attention &a) {
            return q_bytes(a) + k_bytes(a) + v_bytes(a) + scores_bytes(a) + out_bytes(a) + state_bytes(a) +
                   2 * (kRowsBytes + kScalesBytes) + q_scales_bytes(a) + wide_bytes(a) + parts_bytes(a);
        }

        Workspace() = default;
        Workspace(const Attention &a, char *memory) {
            q = reinterpret_cast<P *>(memory);
            k = reinterpret_cast<P *>(memory += q_bytes(a));
            v = reinterpret_cast<float *>(memory += k_bytes(a));
            scores = reinterpret_cast<float *>(memory += v_bytes(a));
            out = reinterpret_cast<float *>(memory += scores_bytes(a));
            state = reinterpret_cast<RowState *>(memory += out_bytes(a));
            k_rows = reinterpret_cast<const E **>(memory += state_bytes(a));
            v_rows = reinterpret_cast<const E **>(memory += kRowsBytes);
            q_scales = reinterpret_cast<DigitScale *>(memory += kRowsBytes);
            k_scales = reinterpret_cast<float *>(memory += q_scales_bytes(a));
            v_scales = reinterpret_cast<float *>(memory += kScalesBytes);
            wide = reinterpret_cast<bf16 *>(memory += kScalesBytes);
            parts = memory + wide_bytes(a);
        }
    };

    // The scales of `keys` keys of a head from `key` on, all of them below the sequence's length.
    void read_scales(const TensorView &scales, int64_t b, int64_t kv_head, int64_t key, int64_t keys, float *to) const {
        each_scale_block(scales, b, kv_head, key, keys, [&](const float *from, int64_t stride, int64_t n) {
            if (stride == 1) {
                for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
            } else {
                for (int64_t i = 0; i < n; ++i) {
                    to[i] = from[i * stride];
                }
            }
            to += n;
        });
    }

    // Prefetches the next scales, a cache line for each block of the cache or for 16 keys.
    void fetch_scales(int64_t b, const Sequence &s, int64_t kv_head, int64_t key) const {
        const int64_t left = s.length - key, keys = left < s.key_block ? left : s.key_block;
        const TensorView *const both[] = {&a_.k_scales, &a_.v_scales};
        for (const TensorView *scales : both) {
            each_scale_block(*scales, b, kv_head, key, keys, [](const float *from, int64_t stride, int64_t n) {
                for (int64_t i = 0; i < n; i += kLineBytes / 4) {
                    __builtin_prefetch(from + i * stride);
                }
            });
        }
    }

    // Computes a work tile, one block of keys after another, each for all heads; `then` is the next work tile.
    void compute(const WorkTile &u, const WorkTile *then, const Workspace &space) const {
        const Sequence &s = u.s;
        const auto *q = a_.q.template as<const T>();
        Workspace of_head[kMaxTogether];
        for (int64_t h = 0; h < heads_together_; ++h) {
            Workspace &head = of_head[h] = space;
            head.q += h * u.rows * kParts * columns_, head.out += h * u.rows * width_, head.state += h * u.rows;
            head.q_scales += h * u.rows;
            for (int64_t r = 0; r < u.rows; ++r) {
                const T *const row = q + offset(a_.q, u.b, s, u.kv_head + h, u.first_row + r);
                pack_query(s, head, r, u.rows, row);
                head.state[r] = first_state(u, u.kv_head + h, u.first_row + r);
            }
        }
        std::memset(space.out, 0, static_cast<size_t>(heads_together_ * u.rows * width_) * 4);
        const E **k_next = space.k_rows + kKeyBlock, **v_next = space.v_rows + kKeyBlock;
        if (u.begin < u.end) {
            locate(u.b, s, u.kv_head, u.begin, k_next, v_next);
        }
        const auto row_bytes = static_cast<size_t>(s.key_block) * sizeof *space.k_rows;
        for (int64_t key = u.begin; key < u.end; key += s.key_block) {
            const int64_t keys = u.end - key < s.key_block ? u.end - key : s.key_block;
            std::memcpy(space.k_rows, k_next, row_bytes);
            std::memcpy(space.v_rows, v_next, row_bytes);
            int64_t ahead_keys = 0;
            if (key + s.key_block < u.end) {
                locate(u.b, s, u.kv_head, key + s.key_block, k_next, v_next);
                ahead_keys = s.key_block;
            } else if (then && then->begin < then->end) {
                locate(then->b, then->s, then->kv_head, then->begin, k_next, v_next);
                ahead_keys = then->s.key_block;
            }
            // Prefetches a line of each of the next pages, so that their addresses are translated early.
            for (int64_t i = 0; i < ahead_keys; i += kPageKeys) {
                __builtin_prefetch(k_next[i]);
                __builtin_prefetch(v_next[i]);
            }
            for (int64_t h = 0; h < heads_together_; ++h) {
                KvPrefetcher<E> ahead(k_next, v_next, s.packs_values ? 0 : ahead_keys, size_, a_.k.strides[2],
                                      a_.v.strides[2], heads_together_, h, keys_first_);
                if constexpr (kScaled) {
                    read_scales(a_.k_scales, u.b, u.kv_head + h, key, keys, space.k_scales);
                    read_scales(a_.v_scales, u.b, u.kv_head + h, key, keys, space.v_scales);
                    if (key + s.key_block < u.end) {
                        fetch_scales(u.b, s, u.kv_head + h, key + s.key_block);
                    }
                }
                attend(u.b, s, u.kv_head + h, u.first_row, u.rows, key, keys, of_head[h], ahead);
                for (int64_t i = 0; h + 1 < heads_together_ && i < s.key_block; ++i) {
                    space.k_rows[i] += a_.k.strides[2];
                    space.v_rows[i] += a_.v.strides[2];
                }
            }
        }

        for (int64_t h = 0; h < heads_together_; ++h) {
            for (int64_t r = 0; r < u.rows; ++r) {
                const float total = sum(of_head[h].state[r].sum);
                const float *line = of_head[h].out + r * width_;
                if (s.splits > 1) {
                    const int64_t at = ((u.b * kv_heads_ + u.kv_head + h) * splits_ + u.split) * row_limit_ + r;
                    std::memcpy(partial_out_ + at * width_, line, static_cast<size_t>(width_) * 4);
                    partial_sums_[2 * at] = total;
                    partial_sums_[2 * at + 1] = of_head[h].state[r].largest;
                } else {
                    write(u.b, s, u.kv_head + h, u.first_row + r, line, total);
                }
            }
        }
    }

    // A row's sums before its first key: its sink's, once for all splits.
    RowState first_state(const WorkTile &u, int64_t kv_head, int64_t row) const {
        if (!a_.sinks.dtype || u.split > 0) {
            return RowState();
        }
        const int64_t head = kv_head * group_ + row % group_;
        return RowState(widen(a_.sinks.template as<const T>()[head * a_.sinks.strides[0]]));
    }

    // Packs row r of `rows`. Digits are stored place by place: those of all rows for one place, then for the next.
    void pack_query(const Sequence &s, const Workspace &head, int64_t r, int64_t rows, const T *row) const {
        if constexpr (kTiled) {
            if (s.tiled) {
                copy_row_for_tiles(reinterpret_cast<char *>(head.q) + r * tile_row_bytes(size_), row, size_);
                return;
            }
        }
        P *const packed = head.q + r * columns_;
        if constexpr (kParts > 1) {
            if (s.dots) {
                head.q_scales[r] = pack_digits(reinterpret_cast<D *>(packed), rows * columns_, row, size_);
                return;
            }
        }
        pack_row(packed, row, size_);
    }

    // Processes a block of keys: computes scores and probabilities, and adds their product with V to out.
    void attend(int64_t b, const Sequence &s, int64_t kv_head, int64_t first_row, int64_t rows, int64_t key,
                int64_t keys, const Workspace &space, KvPrefetcher<E> &ahead) const {
        // How many of these keys the last of the rows up to `row` sees.
        const auto seen = [&](int64_t row) {
            const int64_t n = visible(s, first_row + row) - key;
            return n < 0 ? 0 : n < keys ? n : keys;
        };
        // And how many are before the windows of the rows from `row` on.
        const bool windows_begin = hidden(s, first_row + rows - 1) > key;
        const auto unseen = [&](int64_t row) {
            const int64_t n = windows_begin ? hidden(s, first_row + row) - key : 0;
            return n < 0 ? 0 : n < keys ? n : keys;
        };
        if (s.dots) {
            dot_all(reinterpret_cast<const D *>(space.q), rows * kParts, space.k_rows, keys, space.scores, ahead);
        } else if (kTiled && s.tiled) {
            if constexpr (kTiled) {
                const bf16 *wide_rows[kKeyBlock];
                score_in_tiles(*products_, reinterpret_cast<const char *>(space.q), rows,
                               as_bfloat16(space.k_rows, keys, size_, space.wide, wide_rows), keys, size_,
                               reinterpret_cast<char *>(space.k), seen, space.scores);
                products_->pack_values(as_bfloat16(space.v_rows, keys, size_, space.wide, wide_rows), keys, size_,
                                       reinterpret_cast<char *>(space.v));
            }
        } else {
            pack_keys(space.k, space.k_rows, keys, size_, ahead);
            for (int64_t at = 0; at < keys; at += kTileColumns) {
                for_each_tile(rows, [&](int64_t row, int64_t count) {
                    const int64_t n = seen(row + count - 1) - at;
                    if (n > 0) {
                        RegisterTiles<false, P, Dense<P>>::of(count,
                                                              n < kTileColumns ? ceil_div(n, kLanes) : kTileVectors)(
                            space.q + row * columns_, columns_, {space.k + at * columns_, kTileColumns}, depth_,
                            space.scores + row * kKeyBlock + at, kKeyBlock);
                    }
                });
            }
        }
        const bool in_digits = kParts > 1 && s.dots && size_ % kTileColumns == 0;
        const bool tiled = kTiled && s.tiled;
        for_each_tile(rows, tiled, [&](int64_t row, int64_t count) {
            const int64_t most = seen(row + count - 1), width = tiled ? round_up(most, attention::kTileDepth) : most;
            for (int64_t r = row; r < row + count; ++r) {
                float *scores = space.scores + r * kKeyBlock;
                const int64_t n = seen(r), t = (first_row + r) / group_,
                              head = kv_head * group_ + (first_row + r) % group_;
                float scale = scale_;
                float unit = 1.0f;
                if constexpr (kParts > 1) {
                    if (s.dots) {
                        join_digits(scores, rows * kKeyBlock, n, space.q_scales[r]);
                        unit = space.q_scales[r].unit;
                    }
                }
                if constexpr (kScaled) {
                    multiply_keys(scores, unit, space.k_scales, n);
                }
                if (a_.softcap > 0) {
                    cap_scores<T>(scores, n, cap_factor_, softcap_);
                    scale = 1.0f;
                }
                if (a_.mask.dtype) {
                    const int64_t *strides = mask_strides_;
                    add_mask(scores, a_.mask, b * strides[0] + head * strides[1] + t * strides[2] + key * strides[3],
                             strides[3], n, scale);
                    scale = 1.0f;
                }
                if (a_.alibi_slopes.dtype) {
                    const float slope = a_.alibi_slopes.template as<const float>()[head * a_.alibi_slopes.strides[0]];
                    add_slope(scores, slope, key - (s.length - s.queries + t), n, scale);
                    scale = 1.0f;
                }
                if (unseen(r) > 0) {
                    hide_first(scores, unseen(r), n, scale);
                    scale = 1.0f;
                }
                const float factor = softmax<T>(scores, n, width, scale, space.state[r]);
                if constexpr (kScaled) {
                    if (!in_digits) {
                        const int64_t first = unseen(r);
                        multiply_keys(scores + first, 1.0f, space.v_scales + first, n - first);
                    }
                }
                if constexpr (kTiled) {
                    if (tiled) {
                        split_probabilities(scores, width, space.parts + (r - row) * kPartsBytes);
                    }
                }
                if (factor != 1.0f) {
                    float *out = space.out + r * width_;
                    for (int64_t i = 0; i < width_; i += kLanes) {
                        store(out + i, load(out + i) * splat(factor));
                    }
                }
            }
            if constexpr (kTiled) {
                if (tiled) {
                    add_values_in_tiles(*products_, space.parts, count, unseen(row), most,
                                        reinterpret_cast<const char *>(space.v), keys, size_, space.out + row * width_,
                                        width_);
                }
            }
        });
        if constexpr (kParts > 1) {
            if (in_digits) {
                add_digits(rows, seen, unseen, space, ahead);
                return;
            }
        }
        if (tiled) {
            return;
        }
        if (s.packs_values) {
            pack_values(space.v, space.v_rows, keys, size_);
            for (int64_t column = 0; column < size_; column += kTileColumns) {
                add_values(rows, seen, unseen, space, Dense<float>{space.v + column * keys, kTileColumns}, column);
            }
        } else {
            for (int64_t column = 0; column < size_; column += kTileColumns) {
                add_values(rows, seen, unseen, space, Scattered<E>{space.v_rows, column, ahead}, column);
            }
        }
    }

    void dot_all(const D *q, int64_t rows, const E *const *k, int64_t keys, float *scores,
                 KvPrefetcher<E> &ahead) const {
        for (int64_t row = 0; row < rows;) {
            const int64_t count = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
            (count == 4 ? dot_rows<4, D, E>
             : count == 2
                 ? dot_rows<2, D, E>
                 : dot_rows<1, D, E>)(q + row * columns_, columns_, k, keys, size_, scores + row * kKeyBlock, ahead);
            row += count;
        }
    }

    // Computes a row's scores for n keys from those of its digits, `pitch` floats from place to place.
    static void join_digits(float *scores, int64_t pitch, int64_t n, const DigitScale &scale) {
        for (int64_t i = 0; i < n; i += kLanes) { // whole vectors: there is room for them
            store(scores + i, scale.value(load(scores + i), load(scores + pitch + i), load(scores + 2 * pitch + i)));
        }
    }

    // out += probabilities V, both as integers.
    template <typename Seen, typename Unseen>
    void add_digits(int64_t rows, const Seen &seen, const Unseen &unseen, const Workspace &space,
                    KvPrefetcher<E> &ahead) const {
        DigitScale scales[kMaxDotRows];
        for (int64_t r = 0; r < rows; ++r) {
            scales[r] = pack_probabilities(space.scores + r * kKeyBlock, space.v_scales, seen(r));
        }
        for (int64_t column = 0; column < size_; column += kTileColumns) {
            for (int64_t row = 0; row < rows; row += 2) {
                const int64_t count = rows - row < 2 ? 1 : 2;
                multiply_digits(count, space.scores + row * kKeyBlock, scales + row, space.v_rows, column, unseen(row),
                                seen(row + count - 1), space.out + row * width_ + column, width_, ahead);
            }
        }
    }

    // out += probabilities V for the columns of V's panel that begins at `column`.
    template <typename Seen, typename Unseen, typename V>
    void add_values(int64_t rows, const Seen &seen, const Unseen &unseen, const Workspace &space, const V &v,
                    int64_t column) const {
        const int64_t rest = ceil_div(size_ - column, kLanes);
        for_each_tile(rows, [&](int64_t row, int64_t count) {
            const int64_t first = unseen(row);
            RegisterTiles<true, float, V>::of(count, rest < kTileVectors ? rest : kTileVectors)(
                space.scores + row * kKeyBlock + first, kKeyBlock, v.from(first), seen(row + count - 1) - first,
                space.out + row * width_ + column, width_);
        });
    }

    // Calls body(row, count) for tiles of at most kTileRows rows, as even as possible.
    template <typename Body> static void for_each_tile(int64_t rows, const Body &body) {
        const int64_t tiles = ceil_div(rows, kTileRows);
        for (int64_t i = 0; i < tiles; ++i) {
            body(rows * i / tiles, rows * (i + 1) / tiles - rows * i / tiles);
        }
    }

    // The same, or for the groups of rows that tile registers multiply at once.
    template <typename Body> static void for_each_tile(int64_t rows, bool tiled, const Body &body) {
        const int64_t groups = ceil_div(rows, tiled ? kPairedRows : kTileRows);
        for (int64_t i = 0; i < groups; ++i) {
            const int64_t row = tiled ? i * kPairedRows : rows * i / groups;
            const int64_t end = tiled ? row + kPairedRows : rows * (i + 1) / groups;
            body(row, (end < rows ? end : rows) - row);
        }
    }

    // Combines the row's sums over the splits, each relative to its own largest score.
    void combine(int64_t line, int64_t row) const {
        const int64_t kv_head = line % kv_heads_, b = line / kv_heads_;
        const Sequence s = sequence(b);
        if (s.splits == 1 || row >= s.rows) {
            return;
        }
        const auto at = [&](int64_t split) { return (line * splits_ + split) * row_limit_ + row; };
        float largest = -INFINITY;
        for (int64_t i = 0; i < s.splits; ++i) {
            const float value = partial_sums_[2 * at(i) + 1];
            largest = value > largest ? value : largest;
        }
        largest = largest == -INFINITY ? 0.0f : largest;
        float total = 0;
        float *out = partial_out_ + at(0) * width_;
        for (int64_t i = 0; i < s.splits; ++i) {
            const VecF factor = exp(splat(partial_sums_[2 * at(i) + 1] - largest));
            const float *part = partial_out_ + at(i) * width_;
            total += partial_sums_[2 * at(i)] * factor[0];
            for (int64_t c = 0; c < width_; c += kLanes) {
                store(out + c, i == 0 ? load(part + c) * factor : fma(load(part + c), factor, load(out + c)));
            }
        }
        write(b, s, kv_head, row, out, total);
    }

    void write(int64_t b, const Sequence &s, int64_t kv_head, int64_t row, const float *line, float total) const {
        T *out = a_.out.template as<T>() + offset(a_.out, b, s, kv_head, row);
        const VecF inverse = splat(1.0f / total);
        for_each_vector(size_, [&](int64_t i, auto lanes) {
            store_at(out, i, total == 0 ? VecF{} : load(line + i) * inverse, lanes);
        });
    }

    int64_t depth_;     // packed columns of a row of q or k that are not padding
    int64_t columns_;   // and with padding
    int64_t row_bytes_; // of a packed row of q or k, however its sequence is multiplied
    int64_t width_;     // columns of a row of out, whole tiles
    int64_t rows_;      // rows of the largest block, whole tiles
    int64_t mask_strides_[4];
    float scale_;
    float softcap_, cap_factor_;    // scale / softcap, where there is a cap
    float *partial_out_ = nullptr;  // [pieces, rows, width]
    float *partial_sums_ = nullptr; // [pieces, rows, 2]: the sum and the largest score
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::attention::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (args.k_scales.dtype) {
        with_level_float_type(args.q.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                              [&](auto q) { Attention<decltype(q), int8_t>(args).run(); });
    } else {
        with_level_float_type(args.q.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                              [&](auto q) { Attention<decltype(q), decltype(q)>(args).run(); });
    }
}
