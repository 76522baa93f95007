// Calls of cuBLAS: its functions by dlopen, one handle per thread and device, and matrices in column-major order.
// Declared after cuBLAS's documentation; the emulation defines functions of the same names.
#include "cublas.h"
#include "cuda/launch.cuh"

#ifndef INFINI_EMULATION
#include <dlfcn.h>
#endif

struct cublasContext;

#ifdef INFINI_EMULATION
extern "C" {
int cublasCreate_v2(cublasContext **handle);
int cublasSetStream_v2(cublasContext *handle, cudaStream_t stream);
int cublasSetWorkspace_v2(cublasContext *handle, void *workspace, size_t bytes);
int cublasSetMathMode(cublasContext *handle, int mode);
int cublasGemmStridedBatchedEx_64(cublasContext *handle, int transpose_a, int transpose_b, int64_t m, int64_t n,
                                  int64_t k, const void *alpha, const void *a, int a_type, int64_t lda,
                                  long long a_step, const void *b, int b_type, int64_t ldb, long long b_step,
                                  const void *beta, void *c, int c_type, int64_t ldc, long long c_step, int64_t batch,
                                  int compute_type, int algorithm);
}
#endif

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

struct Functions {
    int (*create)(cublasContext **);
    int (*set_stream)(cublasContext *, cudaStream_t);
    int (*set_workspace)(cublasContext *, void *, size_t);
    int (*set_math_mode)(cublasContext *, int);
    int (*multiply)(cublasContext *, int, int, int64_t, int64_t, int64_t, const void *, const void *, int, int64_t,
                    long long, const void *, int, int64_t, long long, const void *, void *, int, int64_t, long long,
                    int64_t, int, int);
};

#ifdef INFINI_EMULATION

const Functions &functions() {
    static constexpr Functions all{cublasCreate_v2, cublasSetStream_v2, cublasSetWorkspace_v2, cublasSetMathMode,
                                   cublasGemmStridedBatchedEx_64};
    return all;
}

#else

void *open_library() {
    constexpr const char *names[] = {"libcublas.so.13", "libcublas.so.12"};
    for (const char *name : names) { // prefer the library that the process has loaded: torch brings its own
        if (void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) {
            return library;
        }
    }
    for (const char *name : names) {
        if (void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
            return library;
        }
    }
    throw Error(INFINI_STATUS_INTERNAL_ERROR,
                "infini: a dense product on CUDA needs libcublas.so.13 or libcublas.so.12 where the loader looks for "
                "libraries: put its folder into LD_LIBRARY_PATH");
}

Functions load_functions() {
    void *const library = open_library();
    const auto find = [&](auto &function, const char *name) {
        void *const address = dlsym(library, name);
        if (address == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message("infini: this libcublas has no function ", name));
        }
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
    Functions all;
    find(all.create, "cublasCreate_v2");
    find(all.set_stream, "cublasSetStream_v2");
    find(all.set_workspace, "cublasSetWorkspace_v2");
    find(all.set_math_mode, "cublasSetMathMode");
    find(all.multiply, "cublasGemmStridedBatchedEx_64");
    return all;
}

const Functions &functions() {
    static const Functions all = load_functions();
    return all;
}

#endif

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
    const Functions &cublas = functions();
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

} // namespace infini::gemm
