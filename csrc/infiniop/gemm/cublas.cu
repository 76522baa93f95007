// Calls of cuBLAS: one handle per thread and device, and matrices in column-major order.
#include "cublas.h"

#include "cublas_functions.h"
#include "cuda/launch.cuh"

namespace infini::gemm {
namespace {

constexpr int kDisallowReducedPrecisionReduction = 16; // partial sums of half types stay in float
constexpr int kCompute32F = 68, kCompute32I = 72, kDefaultAlgorithm = -1;
constexpr int kNotTransposed = 0, kTransposed = 1;

int type_of(infiniDtype_t dtype) {
    switch (dtype) {
    case INFINI_DTYPE_F16:
        return 2;
    case INFINI_DTYPE_BF16:
        return 14;
    case INFINI_DTYPE_I8:
        return 3;
    case INFINI_DTYPE_I32:
        return 10;
    default:
        return 0; // float32
    }
}

const char *meaning(int status) {
    switch (status) {
    case 1:
        return "not initialised";
    case 3:
        return "out of memory";
    case 7:
        return "an invalid value";
    case 8:
        return "a GPU it does not know";
    case 13:
        return "the product failed on the GPU";
    case 15:
        return "not supported";
    default:
        return "an error of its own";
    }
}

void check_cublas(const char *function, int status) {
    if (status != 0) {
        throw Error(INFINI_STATUS_INTERNAL_ERROR,
                    message("infini: cuBLAS: ", function, ": status ", status, ", ", meaning(status)));
    }
}

const CublasFunctions &functions() {
    static const CublasFunctions all = [] {
        [[maybe_unused]] const CublasLibrary library("cublas");
        return CublasFunctions{INFINI_FIND(library, cublasCreate_v2), INFINI_FIND(library, cublasSetStream_v2),
                               INFINI_FIND(library, cublasSetWorkspace_v2), INFINI_FIND(library, cublasSetMathMode),
                               INFINI_FIND(library, cublasGemmStridedBatchedEx_64)};
    }();
    return all;
}

const CublasLtFunctions &lt_functions() {
    static const CublasLtFunctions all = [] {
        [[maybe_unused]] const CublasLibrary library("cublasLt");
        return CublasLtFunctions{
            INFINI_FIND(library, cublasLtMatmulDescCreate),
            INFINI_FIND(library, cublasLtMatmulDescSetAttribute),
            INFINI_FIND(library, cublasLtMatmulDescDestroy),
            INFINI_FIND(library, cublasLtMatrixLayoutCreate),
            INFINI_FIND(library, cublasLtMatrixLayoutDestroy),
            INFINI_FIND(library, cublasLtMatmulPreferenceCreate),
            INFINI_FIND(library, cublasLtMatmulPreferenceSetAttribute),
            INFINI_FIND(library, cublasLtMatmulPreferenceDestroy),
            INFINI_FIND(library, cublasLtMatmulAlgoGetHeuristic),
            INFINI_FIND(library, cublasLtMatmul),
        };
    }();
    return all;
}

// The calling thread's handle for the current device. Never destroyed: that would wait for the GPU, and when a thread
// ends the runtime may already be unloaded.
cublasContext *handle() {
    constexpr int kDevices = 64;
    thread_local cublasContext *handles[kDevices] = {};
    int device = 0;
    cuda::check_cuda("cudaGetDevice", cudaGetDevice(&device));
    if (device >= kDevices) {
        throw Error(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED,
                    message("infini: a dense product must be on one of the devices 0 to 63, got ", device));
    }
    if (handles[device] == nullptr) {
        // cublasCreate allocates memory, which fails during a capture in any other mode.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cuda::check_cuda("cudaThreadExchangeStreamCaptureMode", cudaThreadExchangeStreamCaptureMode(&mode));
        const int status = functions().create(&handles[device]);
        cudaThreadExchangeStreamCaptureMode(&mode);
        check_cublas("cublasCreate", status);
        check_cublas("cublasSetMathMode",
                     functions().set_math_mode(handles[device], kDisallowReducedPrecisionReduction));
    }
    return handles[device];
}

bool lies_by_rows(const TensorView &x) {
    const int64_t columns = x.size(-1);
    return (columns <= 1 || x.stride(-1) == 1) && (x.size(-2) <= 1 || x.stride(-2) >= (columns > 1 ? columns : 1));
}

TensorView transposed(TensorView x) {
    const int rows = x.ndim - 2, columns = x.ndim - 1;
    const int64_t size = x.shape[rows], stride = x.strides[rows];
    x.shape[rows] = x.shape[columns];
    x.strides[rows] = x.strides[columns];
    x.shape[columns] = size;
    x.strides[columns] = stride;
    return x;
}

// The row stride of a row-major matrix.
int64_t pitch(const TensorView &x) {
    const int64_t columns = x.size(-1);
    return x.size(-2) > 1 ? x.stride(-2) : columns > 1 ? columns : 1;
}

int64_t step(const TensorView &x) {
    return x.ndim == 3 && x.shape[0] > 1 ? x.strides[0] : 0;
}

// An operand as a row-major matrix, with a flag for transposition.
struct Factor {
    explicit Factor(const TensorView &x)
        : operation(lies_by_rows(x) ? kNotTransposed : kTransposed),
          rows(operation == kNotTransposed ? pitch(x) : pitch(transposed(x))) {}
    int operation;
    int64_t rows; // the row stride
};

// ---- cuBLASLt ----

constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8; // attributes of a product
constexpr uint32_t kAddBias = 4;                                                 // an epilogue
constexpr int kWorkspaceLimit = 1, kReductions = 3, kAlignmentOfA = 5;           // preferences; of B, C and D follow
constexpr uint32_t kSumsInFloat = 2;                                             // of the reductions, beside none
constexpr int kFloat32 = 0;

// An object of cuBLASLt, destroyed with its scope.
template <typename Object> class Owned {
public:
    explicit Owned(int (*destroy)(Object *)) : destroy_(destroy) {}
    ~Owned() {
        if (object_ != nullptr) {
            destroy_(object_);
        }
    }
    Owned(const Owned &) = delete;
    Owned &operator=(const Owned &) = delete;
    Object **address() { return &object_; }
    operator Object *() const { return object_; }

private:
    int (*destroy_)(Object *);
    Object *object_ = nullptr;
};

// The largest power of two, up to 256, that the address is a multiple of.
uint32_t alignment_of(const void *p) {
    uint32_t bytes = 256;
    while (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
        bytes /= 2;
    }
    return bytes;
}

} // namespace

bool cublas_takes(const Args &args) {
    const auto takes = [](const TensorView &x) {
        return (lies_by_rows(x) || lies_by_rows(transposed(x))) && step(x) >= 0;
    };
    return takes(args.a) && takes(args.b) && takes(args.c);
}

void multiply_by_cublas(const ExecutionContext &context, const Args &args) {
    // cuBLAS is column-major: a row-major c is computed as c^T = b^T @ a^T; a column-major c is transposed first.
    const bool by_rows = lies_by_rows(args.c);
    const TensorView c = by_rows ? args.c : transposed(args.c);
    const TensorView a = by_rows ? args.a : transposed(args.b), b = by_rows ? args.b : transposed(args.a);
    const Factor left(b), right(a);
    const bool integers = c.dtype == INFINI_DTYPE_I32;
    const int32_t alpha = static_cast<int32_t>(args.alpha), beta = static_cast<int32_t>(args.beta);
    const CublasFunctions &cublas = functions();
    cublasContext *const own = handle();
    check_cublas("cublasSetStream",
                 // Resets the workspace to cuBLAS's default, so the call's own is set after it.
                 cublas.set_stream(own, cuda::stream_of(context)));
    if (args.workspace != nullptr) {
        const uintptr_t aligned = (reinterpret_cast<uintptr_t>(args.workspace) + 255) / 256 * 256;
        check_cublas("cublasSetWorkspace",
                     cublas.set_workspace(own, reinterpret_cast<void *>(aligned), kWorkspaceBytes - 256));
    }
    check_cublas("cublasGemmStridedBatchedEx",
                 cublas.multiply(own, left.operation, right.operation, c.size(-1), c.size(-2), a.size(-1),
                                 integers ? static_cast<const void *>(&alpha) : &args.alpha, b.data, type_of(b.dtype),
                                 left.rows, step(b), a.data, type_of(a.dtype), right.rows, step(a),
                                 integers ? static_cast<const void *>(&beta) : &args.beta, c.data, type_of(c.dtype),
                                 pitch(c), step(c), c.ndim == 3 ? c.shape[0] : 1, integers ? kCompute32I : kCompute32F,
                                 kDefaultAlgorithm));
}

bool multiply_with_bias(const ExecutionContext &context, const Args &args, const void *bias) {
    if (args.c.ndim != 2 || !lies_by_rows(args.c) || !cublas_takes(args)) {
        return false;
    }
    const Factor left(args.b), right(args.a); // column-major, as above: the bias goes along c^T's columns
    const int64_t m = args.c.size(1), n = args.c.size(0), k = args.a.size(1);
    const int type = type_of(args.c.dtype);
    const CublasLtFunctions &lt = lt_functions();
    const auto check = [](const char *function, int status) { check_cublas(function, status); };

    Owned<cublasLtMatmulDescOpaque_t> product(lt.destroy_product);
    check("cublasLtMatmulDescCreate", lt.create_product(product.address(), kCompute32F, kFloat32));
    const auto set = [&](int attribute, const auto &value) {
        check("cublasLtMatmulDescSetAttribute", lt.set_of_product(product, attribute, &value, sizeof value));
    };
    set(kTransposeA, left.operation);
    set(kTransposeB, right.operation);
    set(kEpilogue, kAddBias);
    set(kBiasPointer, bias);

    Owned<cublasLtMatrixLayoutOpaque_t> a(lt.destroy_layout), b(lt.destroy_layout), c(lt.destroy_layout);
    const auto lay_out = [&](auto &layout, bool transposed, int64_t rows, int64_t columns, int64_t ld) {
        check("cublasLtMatrixLayoutCreate",
              lt.create_layout(layout.address(), type, transposed ? columns : rows, transposed ? rows : columns, ld));
    };
    lay_out(a, left.operation == kTransposed, m, k, left.rows);
    lay_out(b, right.operation == kTransposed, k, n, right.rows);
    lay_out(c, false, m, n, pitch(args.c));

    void *workspace = nullptr;
    size_t workspace_bytes = 0;
    if (args.workspace != nullptr) {
        workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(args.workspace) + 255) / 256 * 256);
        workspace_bytes = kWorkspaceBytes - 256;
    }
    Owned<cublasLtMatmulPreferenceOpaque_t> preference(lt.destroy_preference);
    check("cublasLtMatmulPreferenceCreate", lt.create_preference(preference.address()));
    const auto prefer = [&](int attribute, const auto &value) {
        check("cublasLtMatmulPreferenceSetAttribute",
              lt.set_of_preference(preference, attribute, &value, sizeof value));
    };
    prefer(kWorkspaceLimit, workspace_bytes);
    prefer(kReductions, kSumsInFloat);
    const void *const operands[] = {args.b.data, args.a.data, args.c.data, args.c.data};
    for (int i = 0; i < 4; ++i) {
        prefer(kAlignmentOfA + i, alignment_of(operands[i]));
    }

    cublasContext *const own = handle(); // valid as one of cuBLASLt
    cublasLtMatmulHeuristicResult_t chosen{};
    int found = 0;
    if (lt.choose(own, product, a, b, c, c, preference, 1, &chosen, &found) != 0 || found == 0) {
        return false;
    }
    const float alpha = 1, beta = 0;
    check("cublasLtMatmul",
          lt.multiply(own, product, &alpha, args.b.data, a, args.a.data, b, &beta, args.c.data, c, args.c.data, c,
                      chosen.algorithm, workspace, workspace_bytes, cuda::stream_of(context)));
    return true;
}

} // namespace infini::gemm
