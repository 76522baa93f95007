// The CPU kernel of pack_linear: blocks of rows and words are transposed in registers.
// Limit: memory bandwidth, every element read once and written once.
#include "gemm/pack_panels.h"
#include "linear_packed.h"
#include "parallel.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_packed::kPanel;

constexpr int64_t kVectors = kPanel / kLanes; // per panel

// Up to this many bytes the calling thread packs alone, as in quantize.h: each thread of a loader packs a part.
constexpr int64_t kAloneBytes = 2 << 20;

// Packs vector number `vector` of rows in all panels: its lanes are rows of the packed weight.
void pack_vector(const linear_packed::PackArgs &a, int64_t vector) {
    const int64_t count = a.weight.size(0), k = a.weight.size(1), stride = a.weight.stride(0);
    const int64_t first = vector * kLanes - a.first_row; // the weight's row in lane 0
    const int64_t begin = first < 0 ? -first : 0, end = count - first < kLanes ? count - first : kLanes;
    const auto *weight = a.weight.as<const bf16>();
    auto *out = reinterpret_cast<float *>(a.packed.as<bf16>()) +
                (vector / kVectors * ceil_div(k, 2) * kVectors + vector % kVectors) * kLanes;
    constexpr int64_t kStep = 2 * kLanes;
    for (int64_t i = 0; i < k; i += kStep) {
        const int64_t left = k - i < kStep ? k - i : kStep;
        VecF words[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const bf16 *row = weight + (first + lane) * stride + i;
            words[lane] = lane < begin || lane >= end ? VecF{}
                          : left == kStep             ? load_raw(row, Full{})
                                                      : load_raw(row, static_cast<int>(left));
        }
        transpose(words);
        for (int64_t w = 0; 2 * w < left; ++w, out += kPanel) {
            // The other lanes are rows that other threads pack.
            const auto *from = reinterpret_cast<const float *>(&words[w]);
            std::memcpy(out + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_packed::INFINI_LEVEL::pack_kernel(const PackArgs &args) {
    using namespace infini::INFINI_LEVEL;
    const int64_t rows = args.weight.size(0);
    const int64_t begin = args.first_row / kLanes, end = ceil_div(args.first_row + rows, kLanes);
    parallel_for(
        end - begin, args.weight.numel() * static_cast<int64_t>(sizeof(bf16)),
        [&](int64_t first, int64_t last) {
            for (int64_t vector = begin + first; vector < begin + last; ++vector) {
                pack_vector(args, vector);
            }
        },
        kAloneBytes);
}
