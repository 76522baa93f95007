// KvPrefetcher: prefetches the next block of K and V while the current one is multiplied.
#pragma once

#include "block_sizes.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

// One head's share of the next block of keys of all heads that are processed together, in kStreams distant streams: the
// two halves of the block in K and in V, each in the order of memory. A core drops prefetches while too many lines are
// in flight, so the calls must be spread evenly over the arithmetic: one for each kStreams cache lines that it reads.
template <typename T> class KvPrefetcher {
public:
    static constexpr int64_t kStreams = 4;

    // The rows of the first head are k[0 .. keys-1] and v[0 .. keys-1], those of the next one k_step and v_step further
    // on. keys_first: the rows of a head follow each other in memory, otherwise the heads of a key.
    KvPrefetcher(const T *const *k, const T *const *v, int64_t keys, int64_t size, int64_t k_step, int64_t v_step,
                 int64_t heads, int64_t head, bool keys_first)
        : at_(size), size_(size), k_(k), v_(v), half_(keys / 2), left_(half_), k_step_(k_step), v_step_(v_step),
          heads_(heads), keys_first_(keys_first) {
        key_ = keys_first ? 0 : half_ * head / heads;
        head_ = keys_first ? head : half_ * head % heads;
    }

    // Prefetches a cache line of each stream, if any is left.
    INFINI_ALWAYS_INLINE void fetch() {
        if (at_ >= size_) {
            if (left_ == 0) {
                return;
            }
            next_rows();
        }
        for (const T *&line : lines_) {
            prefetch_weight(line, far_);
            line += kLine;
        }
        at_ += kLine;
    }

private:
    static constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));

    void next_rows() {
        lines_[0] = k_[key_] + head_ * k_step_;
        lines_[1] = v_[key_] + head_ * v_step_;
        lines_[2] = k_[key_ + half_] + head_ * k_step_;
        lines_[3] = v_[key_ + half_] + head_ * v_step_;
        at_ = 0;
        --left_;
        if (keys_first_) {
            ++key_;
        } else if (++head_ == heads_) {
            head_ = 0;
            ++key_;
        }
    }

    const T *lines_[kStreams];
    int64_t at_, size_; // elements of the rows: fetched, and all
    const T *const *k_, *const *v_;
    int64_t half_, left_; // keys of a stream: all, and to fetch
    int64_t k_step_, v_step_, heads_, key_, head_;
    bool keys_first_, far_ = weight_reading() == WeightReading::kOnePlace;
};

} // namespace
} // namespace infini::INFINI_LEVEL
