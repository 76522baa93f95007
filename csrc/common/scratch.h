// Scratch memory for CPU kernels: one block a thread, grown when needed, kept for the next call, freed with the thread.
// A kernel may hold one block at a time: the next call of scratch() on the same thread invalidates it.
#pragma once

#include <cstddef>

namespace infini::cpu {

// At least `bytes` bytes, aligned to 64, uninitialised. Throws Error when memory is short.
void *scratch(size_t bytes);

// The op that the calling thread checks and then runs, for that Error.
void scratch_is_for(const char *op);

} // namespace infini::cpu
