// INFINI_LEVEL: the instruction set that this file is being compiled for, as the name of a namespace. *_cpu.cpp and
// *_tiles.cpp files, and the headers with functions that they include, put their code into infini::INFINI_LEVEL and an
// anonymous namespace. Otherwise the linker might keep a function's AVX-512 copy for every machine.
#pragma once

#if defined(__AMX_TILE__)
#define INFINI_LEVEL avx512_amx
#elif defined(INFINI_EMULATED_TILES)
#define INFINI_LEVEL emulated_amx
#elif defined(__AVX512BF16__)
#define INFINI_LEVEL avx512_bf16
#elif defined(__AVX512VNNI__)
#define INFINI_LEVEL avx512_vnni
#elif defined(__AVX512F__)
#define INFINI_LEVEL avx512
#elif defined(__AVXVNNI__)
#define INFINI_LEVEL avx2_vnni
#elif defined(__AVX2__)
#define INFINI_LEVEL avx2
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define INFINI_LEVEL neon_bf16
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define INFINI_LEVEL neon_dotprod
#elif defined(__aarch64__)
#define INFINI_LEVEL neon
#else
#define INFINI_LEVEL baseline
#endif
