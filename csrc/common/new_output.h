// The output that the calling thread has just allocated: kernels store a large one with ordinary instead of streaming
// stores, because the first touch of each page brings it in zeroed and cached.
#pragma once

namespace infini::cpu {

// Records such an output; and clears the record, returning whether it was `output`.
void note_new_output(const void *output);
bool take_new_output(const void *output);

} // namespace infini::cpu
