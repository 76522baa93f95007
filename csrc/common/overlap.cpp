// Whether two views share a byte. For almost every call their memory spans are disjoint, which answers it. If the spans
// intersect (the halves of a fused buffer, every other row, a transposed view), a bounded integer problem is solved
// exactly: can a sum of strides, each taken a bounded number of times, equal the distance between the views?
#include <algorithm>
#include <utility>

#include "check.h"

namespace infini {

namespace {

// In bytes. 128 bits, because the extents of two views, each below 2^63, are added and subtracted.
using Bytes = __int128;

// A value out of 0, step, 2 * step, ..., most * step.
struct Term {
    Bytes step, most;
};

// Views count as overlapping if the search exceeds this many nodes. Strides in practice need a few; more nodes take
// several dimensions with strides that are neither nested nor multiples of each other.
constexpr int kMaxNodes = 20000;

Bytes gcd(Bytes a, Bytes b) {
    while (b != 0) {
        a = std::exchange(b, a % b);
    }
    return a;
}

// All sums of one value from each term.
class Sums {
public:
    void add(Bytes step, Bytes most) { terms_[count_++] = {step, most}; }

    // Whether any sum lies in [low, high].
    bool reach(Bytes low, Bytes high) {
        merge();
        total_[count_] = divisor_[count_] = 0;
        for (int i = count_ - 1; i >= 0; --i) {
            total_[i] = total_[i + 1] + terms_[i].step * terms_[i].most;
            divisor_[i] = gcd(divisor_[i + 1], terms_[i].step);
        }
        nodes_ = 0;
        return search(0, low, high);
    }

private:
    // Merges two terms that together form all multiples of a step, and sorts by descending step.
    void merge() {
        std::sort(terms_, terms_ + count_, [](const Term &a, const Term &b) { return a.step < b.step; });
        int last = 0;
        for (int i = 1; i < count_; ++i) {
            Term &smaller = terms_[last];
            const Bytes times = terms_[i].step / smaller.step;
            if (terms_[i].step % smaller.step == 0 && times <= smaller.most + 1) {
                smaller.most += times * terms_[i].most;
            } else {
                terms_[++last] = terms_[i];
            }
        }
        count_ = std::min(count_, last + 1);
        std::reverse(terms_, terms_ + count_);
    }

    // Searches the terms from `first` on.
    bool search(int first, Bytes low, Bytes high) {
        if (++nodes_ > kMaxNodes) {
            return true;
        }
        if (high < 0 || low > total_[first]) {
            return false;
        }
        if (low <= 0 || high >= total_[first]) {
            return true; // every term at its smallest, or at its largest, value
        }
        if (high / divisor_[first] * divisor_[first] < low) {
            return false;
        }
        const Term &term = terms_[first];
        const Bytes rest = total_[first + 1], to = std::min(term.most, high / term.step);
        for (Bytes n = low > rest ? (low - rest + term.step - 1) / term.step : 0; n <= to; ++n) {
            if (search(first + 1, low - n * term.step, high - n * term.step)) {
                return true;
            }
        }
        return false;
    }

    Term terms_[2 * kMaxDims];
    Bytes total_[2 * kMaxDims + 1], divisor_[2 * kMaxDims + 1]; // of the terms from that index on
    int count_ = 0, nodes_ = 0;
};

// First and one past the last byte that the view touches.
void extent(const TensorView &view, const char *&begin, const char *&end) {
    int64_t low = 0, high = 0;
    for (int i = 0; i < view.ndim; ++i) {
        const int64_t reach = (view.shape[i] - 1) * view.strides[i];
        (reach < 0 ? low : high) += reach;
    }
    const auto bytes = static_cast<int64_t>(size_of(view.dtype));
    begin = view.as<const char>() + low * bytes;
    end = view.as<const char>() + (high + 1) * bytes;
}

// A view without memory: the C ABI checks those when a descriptor is created.
bool has_no_memory(const TensorView &view) {
    return view.data == nullptr || view.numel() == 0;
}

void add_steps(Sums &sums, const TensorView &view) {
    for (int i = 0; i < view.ndim; ++i) {
        if (view.shape[i] > 1 && view.strides[i] != 0) {
            const Bytes step = static_cast<Bytes>(view.strides[i]) * static_cast<Bytes>(size_of(view.dtype));
            sums.add(step < 0 ? -step : step, view.shape[i] - 1);
        }
    }
}

} // namespace

bool spans_overlap(const TensorView &a, const TensorView &b) {
    if (has_no_memory(a) || has_no_memory(b)) {
        return false;
    }
    const char *a_begin, *a_end, *b_begin, *b_end;
    extent(a, a_begin, a_end);
    extent(b, b_begin, b_end);
    return a_begin < b_end && b_begin < a_end;
}

bool overlap(const TensorView &a, const TensorView &b) {
    return spans_overlap(a, b) && elements_overlap(a, b);
}

bool elements_overlap(const TensorView &a, const TensorView &b) {
    // An element of a begins at a_begin plus strides of a; an element of b ends at b_end minus strides of b. They
    // overlap if the first begins before the second ends, by less than the sum of both sizes.
    const char *a_begin, *a_end, *b_begin, *b_end;
    extent(a, a_begin, a_end);
    extent(b, b_begin, b_end);
    Sums steps;
    add_steps(steps, a);
    add_steps(steps, b);
    const Bytes distance = b_end - a_begin, sizes = static_cast<Bytes>(size_of(a.dtype) + size_of(b.dtype));
    return steps.reach(distance - sizes + 1, distance - 1);
}

} // namespace infini
