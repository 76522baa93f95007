// The functions of cuBLAS and cuBLASLt that are called, declared after their documentation and found by dlopen at the
// first call: neither the build nor a library depends on them. The emulation defines functions of the same names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/launch.cuh"

#ifndef INFINI_EMULATION
#include <dlfcn.h>
#endif

struct cublasContext; // also a handle of cuBLASLt
struct cublasLtMatmulDescOpaque_t;
struct cublasLtMatrixLayoutOpaque_t;
struct cublasLtMatmulPreferenceOpaque_t;

// An algorithm of cuBLASLt for a product, as its search returns it.
struct cublasLtMatmulHeuristicResult_t {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

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

int cublasLtMatmulDescCreate(cublasLtMatmulDescOpaque_t **product, int compute_type, int scale_type);
int cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t *product, int attribute, const void *value, size_t bytes);
int cublasLtMatmulDescDestroy(cublasLtMatmulDescOpaque_t *product);
int cublasLtMatrixLayoutCreate(cublasLtMatrixLayoutOpaque_t **layout, int type, uint64_t rows, uint64_t columns,
                               int64_t ld);
int cublasLtMatrixLayoutDestroy(cublasLtMatrixLayoutOpaque_t *layout);
int cublasLtMatmulPreferenceCreate(cublasLtMatmulPreferenceOpaque_t **preference);
int cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t *preference, int attribute, const void *value,
                                         size_t bytes);
int cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreferenceOpaque_t *preference);
int cublasLtMatmulAlgoGetHeuristic(cublasContext *handle, cublasLtMatmulDescOpaque_t *product,
                                   cublasLtMatrixLayoutOpaque_t *a, cublasLtMatrixLayoutOpaque_t *b,
                                   cublasLtMatrixLayoutOpaque_t *c, cublasLtMatrixLayoutOpaque_t *d,
                                   cublasLtMatmulPreferenceOpaque_t *preference, int wanted,
                                   cublasLtMatmulHeuristicResult_t *results, int *found);
int cublasLtMatmul(cublasContext *handle, cublasLtMatmulDescOpaque_t *product, const void *alpha, const void *a,
                   cublasLtMatrixLayoutOpaque_t *a_layout, const void *b, cublasLtMatrixLayoutOpaque_t *b_layout,
                   const void *beta, const void *c, cublasLtMatrixLayoutOpaque_t *c_layout, void *d,
                   cublasLtMatrixLayoutOpaque_t *d_layout, const uint64_t *algorithm, void *workspace,
                   size_t workspace_bytes, cudaStream_t stream);
}

namespace infini::gemm {

// The functions, by their names without "cublas" and version.
struct CublasFunctions {
    decltype(&cublasCreate_v2) create;
    decltype(&cublasSetStream_v2) set_stream;
    decltype(&cublasSetWorkspace_v2) set_workspace;
    decltype(&cublasSetMathMode) set_math_mode;
    decltype(&cublasGemmStridedBatchedEx_64) multiply;
};

struct CublasLtFunctions {
    decltype(&cublasLtMatmulDescCreate) create_product;
    decltype(&cublasLtMatmulDescSetAttribute) set_of_product;
    decltype(&cublasLtMatmulDescDestroy) destroy_product;
    decltype(&cublasLtMatrixLayoutCreate) create_layout;
    decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
    decltype(&cublasLtMatmulPreferenceCreate) create_preference;
    decltype(&cublasLtMatmulPreferenceSetAttribute) set_of_preference;
    decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
    decltype(&cublasLtMatmulAlgoGetHeuristic) choose;
    decltype(&cublasLtMatmul) multiply;
};

#ifdef INFINI_EMULATION
#define INFINI_FIND(library, function) &function
struct CublasLibrary {
    explicit CublasLibrary(const char *) {}
};
#else
#define INFINI_FIND(library, function) library.find<decltype(&function)>(#function)

// libcublas or libcublasLt, of CUDA 13 or 12.
class CublasLibrary {
public:
    explicit CublasLibrary(const char *name) : name_(name) {
        for (const int how : {RTLD_NOLOAD, 0}) { // prefer the library that the process has loaded: torch brings its own
            for (const char *release : {".so.13", ".so.12"}) {
                if (library_ == nullptr) {
                    library_ = dlopen((message("lib", name, release)).c_str(), RTLD_NOW | RTLD_LOCAL | how);
                }
            }
        }
        if (library_ == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR,
                        message("infini: a dense product on CUDA needs lib", name, ".so.13 or lib", name,
                                ".so.12 where the loader looks for libraries: put its folder into LD_LIBRARY_PATH"));
        }
    }

    template <typename Function> Function find(const char *function) const {
        void *const address = dlsym(library_, function);
        if (address == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR,
                        message("infini: this lib", name_, " has no function ", function));
        }
        return reinterpret_cast<Function>(address);
    }

private:
    const char *name_;
    void *library_ = nullptr;
};
#endif

} // namespace infini::gemm
