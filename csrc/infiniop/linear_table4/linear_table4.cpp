// The kernels of linear_table4 and quantize_table4.
#include "linear_table4.h"

namespace infini::linear_table4 {
namespace {

// Rows of x from which on tiles are faster than vectors, with the same bits: measured on an Intel Xeon (Sapphire
// Rapids), one thread, 2048 -> 5632.
constexpr int64_t kTileRowsFrom = 12;

KernelTable<panels::Args> kernels{"linear_table4"};
KernelTable<panels::QuantizeArgs> quantize_kernels{"quantize_table4"};

void run_on_cpu(const ExecutionContext &context, const panels::Args &args) {
    const bool in_tiles = cpu_tiles() != Tiles::kNone && args.y.numel() / args.scales.size(0) >= kTileRowsFrom;
    in_tiles ? tile_kernel(context, args) : dot_kernel(context, args);
}

void quantize_on_cpu(const ExecutionContext &context, const panels::QuantizeArgs &args) {
    quantize_kernel(context, args);
}

const RegisteredKernel<panels::Args> registered{kernels, INFINI_DEVICE_CPU, run_on_cpu};
const RegisteredKernel<panels::QuantizeArgs> quantize_registered{quantize_kernels, INFINI_DEVICE_CPU, quantize_on_cpu};

} // namespace

constexpr panels::Op kOp{Checker("linear_table4"), Checker("quantize_table4"), Layout::kBlockBytes, kernels,
                         quantize_kernels};

} // namespace infini::linear_table4
