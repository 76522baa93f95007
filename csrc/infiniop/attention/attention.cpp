// The argument checks of attention, and the call of its kernel.
#include "attention.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "indices.h"
#include "setting.h"
#include "tile_products.h"

namespace infini::attention {

KernelTable<Args> kernels{"attention"};

namespace {

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};

// Dimensions of size 1 are broadcast: their stride is never used.
void check_mask(const Checker &rule, const Args &args) {
    const TensorView &mask = args.mask, &q = args.q;
    rule.rank("mask", mask, 4);
    const int64_t full[] = {q.size(0), q.size(2), q.size(1), args.k.size(1)};
    for (int i = 0; i < 4; ++i) {
        if (mask.shape[i] != full[i] && mask.shape[i] != 1) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "mask",
                      message("be broadcastable to [", full[0], ", ", full[1], ", ", full[2], ", ", full[3],
                              "] (batch, heads, queries, keys)"),
                      shape_of(mask));
        }
    }
    if (mask.dtype != INFINI_DTYPE_BOOL && mask.dtype != INFINI_DTYPE_F32 && mask.dtype != q.dtype) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "mask",
                  q.dtype == INFINI_DTYPE_F32 ? "be bool or float32"
                                              : message("be bool, float32 or ", name_of(q.dtype), " as q is"),
                  name_of(mask.dtype));
    }
}

void check_kv_lens(const ExecutionContext &context, const Checker &rule, const Args &args) {
    const TensorView &lens = args.kv_lens;
    rule.shape("kv_lens", lens, {args.q.size(0)}, "to match the batch size of q");
    rule.dtype("kv_lens", lens, INFINI_INDICES);
    for (int64_t b = 0; b < lens.size(0) && context.is_cpu(); ++b) { // elsewhere the kernel checks them
        const int64_t length = Indices(lens)[b];
        if (length < 0 || length > args.k.size(1)) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "kv_lens",
                      message("be 0 to ", args.k.size(1), ", the number of keys in k"),
                      message(length, " at position ", b));
        }
    }
}

} // namespace

void check(const ExecutionContext &context, const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &q = args.q, &k = args.k, &v = args.v, &out = args.out;
    rule.rank("q", q, 4);
    rule.dtype("q", q, INFINI_FLOATS);
    rule.dense_last("q", q);
    rule.rank("k", k, 4);
    rule.same_dtype("k", k, "q", q);
    rule.shape("k", k, {q.size(0), k.size(1), k.size(2), q.size(3)}, "to match the batch size and the head size of q");
    rule.dense_last("k", k);
    rule.same_dtype("v", v, "q", q);
    rule.same_shape("v", v, "k", k);
    rule.dense_last("v", v);
    const int64_t heads = q.size(2), kv_heads = k.size(2);
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "q",
                  message("have a multiple of k's ", kv_heads, " heads in dimension 2"), std::to_string(heads));
    }
    if (args.mask.dtype) {
        check_mask(rule, args);
    }
    if (args.kv_lens.dtype) {
        check_kv_lens(context, rule, args);
    }
    if (args.sinks.dtype) {
        rule.same_dtype("sinks", args.sinks, "q", q);
        rule.shape("sinks", args.sinks, {heads}, "to match the heads of q");
    }
    constexpr double limit = std::numeric_limits<float>::max();
    rule.range("scale", args.scale, -limit, limit, "be finite in float32");
    rule.range("softcap", args.softcap, 0, limit, "be 0 (no cap), or positive and finite in float32");

    rule.same_shape("out", out, "q", q);
    rule.same_dtype("out", out, "q", q);
    rule.dense_last("out", out);
    rule.writable("out", out);
    rule.no_partial_overlap("out", out, "q", q);
    const TensorView *const others[] = {&k, &v, &args.mask, &args.kv_lens, &args.sinks};
    const char *const names[] = {"k", "v", "mask", "kv_lens", "sinks"};
    for (int i = 0; i < 5; ++i) {
        if (others[i]->dtype) {
            rule.no_overlap("out", out, names[i], *others[i]);
        }
    }
}

void compute(const ExecutionContext &context, const Args &args) {
    if (args.out.numel() > 0) {
        kernels.run(context, args);
    }
}

const TileProducts *tile_products() {
    const TileProducts *products = nullptr;
    if (cpu_tiles() != Tiles::kNone) {
        find_tile_products(ExecutionContext{}, products);
    }
    return products;
}

bool is_exact() {
    return setting_is_on("INFINI_EXACT_ATTENTION", false);
}

float cap_factor(const Args &args) {
    constexpr double limit = std::numeric_limits<float>::max();
    return args.softcap > 0 ? static_cast<float>(std::fmax(-limit, std::fmin(limit, args.scale / args.softcap))) : 0;
}

} // namespace infini::attention
