// The emulator of CUDA's execution model: a grid's blocks run one after another; a block's threads are fibers that
// switch only at barriers and shuffles. Threads resume in a shuffled order, so that races between two barriers tend to
// give wrong numbers. A barrier that some threads never reach, and an unaligned access, is an Error, not a hang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cuda_runtime_api.h"

namespace infini::emulation {

// A cp.async that has started and has not been waited for.
struct AsyncCopy {
    void *to;
    const void *from;
    int bytes, size; // zero-filled from `bytes` to `size`
    unsigned group;
};

struct Fiber {
    uint3 thread{}; // its threadIdx
    int lane = 0, warp = 0;
    unsigned exchanges = 0;              // how many shuffles it has done
    const unsigned *waits_for = nullptr; // resumes when this differs from `seen`
    unsigned seen = 0;
    bool done = false;
    void *stack_pointer = nullptr;
    std::vector<AsyncCopy> copies;
    unsigned groups = 0; // of committed copies
    unsigned dependency_syncs = 0;
};

// The state of the running block; one grid runs at a time.
extern Fiber *fiber;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

inline int lane() {
    return fiber->lane;
}
void *dynamic_shared();

// Ends the kernel with an Error unless p is a multiple of `bytes`, as the hardware does. `access` is its name in the
// message. Accesses through typed pointers need no call: the compiler checks those (-fsanitize=alignment).
[[noreturn]] void refuse_misaligned(const void *p, size_t bytes, const char *access);
inline void check_aligned(const void *p, size_t bytes, const char *access) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
        refuse_misaligned(p, bytes, access);
    }
}

// The number of blocks that have started, this one included.
extern uint64_t blocks_begun;

// Static shared memory: the first thread of a block that reaches its declaration fills it with 0xff, so that reads of
// uninitialized memory give NaN, not the previous block's values.
inline void poison_once(void *p, size_t bytes, uint64_t &last_block) {
    if (last_block != blocks_begun) {
        last_block = blocks_begun;
        std::memset(p, 0xff, bytes);
    }
}
// Kernels run one after another here, so there is nothing to wait for. This only checks that every thread calls it
// once.
inline void grid_dependency_sync() {
    ++fiber->dependency_syncs;
}
void sync_block();
int sync_block_or(int predicate);
// Waits for all lanes of `mask`; returns the value of lane `source` (0 if source is negative).
uint64_t exchange(unsigned mask, uint64_t bits, int source);
// The same with 16 numbers per lane; returns those of all lanes, valid until this lane's exchange after the next.
const float (*gather(const float (&numbers)[16]))[16];
unsigned ballot(unsigned mask, bool predicate);

void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &kernel);

// Queues a kernel on a stream of the current device: runs it, or adds it to the stream's capture. In streams.cpp.
__attribute__((visibility("default"))) void enqueue(cudaStream_t stream, std::function<void()> work);

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
            const std::common_type_t<Parameters> &...args) {
    enqueue(stream, [=] { run_grid(grid, block, shared, [&] { kernel(args...); }); });
}

} // namespace infini::emulation
