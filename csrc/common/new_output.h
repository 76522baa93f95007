// The output that the calling thread has just allocated. Kernels write it with ordinary instead of streaming stores:
// the first touch of each page zeroes it and brings it into the cache.
#pragma once

namespace infini::cpu {

// Records the output that the calling thread has just allocated.
void note_new_output(const void *output);

// Clears the record and returns whether it was `output`.
bool take_new_output(const void *output);

} // namespace infini::cpu
