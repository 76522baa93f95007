// The rules of embedding, and the call of its kernel. On the CPU the ids are checked here; the kernel does not check
// them.
#include "embedding.h"

#include "check.h"

namespace infini::embedding {

KernelTable<Args> kernels{"embedding"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

namespace {

constexpr Checker kRule("embedding");

// Throws for the first id, in row-major order, that is not a row of the table.
template <typename Id> void check_ids(const TensorView &ids, int64_t rows, const char *what) {
    const int64_t count = ids.numel();
    int64_t index[kMaxDims] = {}, offset = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = ids.as<const Id>()[offset];
        if (id < 0 || id >= rows) {
            std::string where;
            for (int dim = 0; dim < ids.ndim; ++dim) {
                where += message(dim ? ", " : " at ids[", index[dim], dim + 1 == ids.ndim ? "]" : "");
            }
            kRule.fail(INFINI_STATUS_BAD_PARAM, "ids", message("be at least 0 and less than ", rows, what),
                       message(id, where));
        }
        for (int dim = ids.ndim - 1; dim >= 0; --dim) {
            offset += ids.strides[dim];
            if (++index[dim] < ids.shape[dim]) {
                break;
            }
            offset -= index[dim] * ids.strides[dim];
            index[dim] = 0;
        }
    }
}

} // namespace

void check(const Args &args) {
    const TensorView &out = args.out, &ids = args.ids, &weight = args.weight;
    kRule.rank("ids", ids, 0, kMaxDims - 1);
    kRule.dtype("ids", ids, INFINI_INDICES);
    kRule.rank("weight", weight, 2);
    kRule.dtype("weight", weight, INFINI_FLOATS);
    kRule.dense_last("weight", weight);
    if (args.first < 0) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "first", "be at least 0", message(args.first));
    }
    if (args.total - args.first < weight.shape[0]) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "total",
                   message("be at least first and the rows of weight, ", args.first, " + ", weight.shape[0]),
                   message(args.total));
    }

    TensorView wanted = ids;
    wanted.shape[wanted.ndim++] = weight.shape[1];
    bool fits = out.ndim == wanted.ndim;
    for (int dim = 0; fits && dim < out.ndim; ++dim) {
        fits = out.shape[dim] == wanted.shape[dim];
    }
    if (!fits) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "out",
                   message("have shape ", shape_of(wanted), ", that of ids and a row of weight"), shape_of(out));
    }
    kRule.same_dtype("out", out, "weight", weight);
    kRule.dense_last("out", out);
    kRule.writable("out", out);
    kRule.no_partial_overlap("out", out, "ids", ids);
    kRule.no_partial_overlap("out", out, "weight", weight);
    if (out.data != nullptr && out.numel() > 0 && out.data == weight.data) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "out", "share no memory with weight", "weight itself");
    }
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    const TensorView &ids = args.ids;
    const bool is_part = args.first != 0 || args.total != args.weight.shape[0];
    if (!context.is_cpu()) {
        // the kernel checks each id
    } else if (ids.dtype == INFINI_DTYPE_I64) {
        check_ids<int64_t>(ids, args.total, is_part ? ", the total" : ", the number of rows of weight");
    } else {
        check_ids<int32_t>(ids, args.total, is_part ? ", the total" : ", the number of rows of weight");
    }
    if (args.out.numel() > 0) {
        kernels.run(context, args);
    }
}

} // namespace infini::embedding
