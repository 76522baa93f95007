// The vendor's kernel of rms_norm and add_rms_norm, in the table of these ops. Their rules have been checked before.
#include "rms_norm/rms_norm.h"

#include <cmath>

#include "kernels.h"

namespace {

using infini::ExecutionContext;
using infini::rms_norm::Args;

void rms_norm_on_qy(const ExecutionContext &context, const Args &args) {
    qy::begin("rms_norm", context, args.x.dtype);
    const int64_t n = args.x.size(-1), rows = args.x.numel() / n;
    const bool with_residual = args.h.dtype != INFINI_DTYPE_INVALID;
    const auto row_of = [&](const infini::TensorView &view, int64_t row) {
        return view.as<float>() + qy::offset_of(view, view.ndim - 1, row);
    };
    for (int64_t row = 0; row < rows; ++row) {
        const float *x = row_of(args.x, row);
        if (with_residual) {
            float *h = row_of(args.h, row);
            const float *residual = row_of(args.residual, row);
            for (int64_t i = 0; i < n; ++i) {
                h[i] = x[i] + residual[i];
            }
            x = h;
        }
        double squares = 0;
        for (int64_t i = 0; i < n; ++i) {
            squares += static_cast<double>(x[i]) * x[i];
        }
        const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + args.eps);
        const auto *weight = args.weight.as<const float>();
        float *y = row_of(args.y, row);
        for (int64_t i = 0; i < n; ++i) {
            y[i] = static_cast<float>(x[i] * scale * weight[i]);
        }
    }
}

const infini::RegisteredKernel<Args> registered{infini::rms_norm::kernels, INFINI_DEVICE_QY, rms_norm_on_qy};

} // namespace

// For the test: what the last call of a kernel was told.
extern "C" INFINI_API const char *qy_last_kernel() {
    return qy::last_call.kernel;
}
extern "C" INFINI_API int qy_last_device() {
    return qy::last_call.context.device_type * 100 + qy::last_call.context.device_id;
}
extern "C" INFINI_API void *qy_last_stream() {
    return qy::last_call.context.stream;
}
