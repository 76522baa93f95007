// Scratch memory for CPU kernels: one block per thread, grown when needed, kept for the next call, freed with the
// thread. A kernel may hold one block at a time: the next call of scratch() on the same thread invalidates it.
#pragma once

#include <cstddef>

namespace infini::cpu {

// At least `bytes` bytes, aligned to 64, uninitialized. Throws Error when out of memory.
void *scratch(size_t bytes);

// Sets the op that the out-of-memory Error names, for the calling thread.
void scratch_is_for(const char *op);

} // namespace infini::cpu
