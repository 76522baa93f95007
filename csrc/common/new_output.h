// The output that the calling thread has just allocated: kernels that write a large one may do so otherwise, for no page of
// it is there yet. The first touch brings a page in, zeroed and cached.
#pragma once

namespace infini::cpu {

// Notes the memory of such an output, and takes the note back: whether `output` is that.
void note_new_output(const void *output);
bool take_new_output(const void *output);

} // namespace infini::cpu
