// Fibers, barriers and shuffles; see emulator.h.
#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../common/cuda/emulated.h"
#include "../common/status.h"

bool infini::emulates_cuda() {
    return true;
}

namespace infini::emulation {

Fiber *fiber;
uint3 block_index;
dim3 block_dim, grid_dim;
uint64_t blocks_begun = 0;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kMaxThreads = 1024, kWarp = 32;
constexpr size_t kMaxShared = 227 * 1024;

struct Warp {
    unsigned live = 0;           // lanes that have not returned
    unsigned arrived = 0;        // lanes that wait in the current exchange
    unsigned generation = 0;     // counts completed exchanges
    uint64_t values[2][kWarp]{}; // of the current exchange and the previous one
    float numbers[2][kWarp][16]{};
};

std::mutex one_grid;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
unsigned live_threads, arrived_threads, block_generation;
int any_predicate[2];
std::vector<unsigned char> shared_memory;
const std::function<void()> *kernel_body;
void *scheduler_stack_pointer;
std::exception_ptr failure;
std::mt19937 shuffler(0); // a fixed seed, so that failures repeat

char *stack_of(int index) {
    static char *const all = [] {
        void *memory = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, "infini: no memory for the emulation's stacks");
        }
        return static_cast<char *>(memory);
    }();
    return all + index * kStackBytes;
}

} // namespace

} // namespace infini::emulation

// Saves the callee-saved registers on the current stack, stores its pointer in *from, and switches to the stack `to`.
extern "C" void infini_switch_stack(void **from, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.local infini_switch_stack
.type infini_switch_stack, @function
infini_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size infini_switch_stack, .-infini_switch_stack
)");
#else
#error "The emulation of CUDA switches stacks by hand: bring infini_switch_stack to this processor."
#endif

namespace infini::emulation {

// How GCC and Clang describe an access (ubsan's TypeMismatchData).
struct TypedAccess {
    const char *file;
    uint32_t line, column;
    struct Type {
        uint16_t kind, info;
        char name[1]; // variable length
    } const *type;
    unsigned char log_alignment, kind;
};

namespace {

void leave() {
    infini_switch_stack(&fiber->stack_pointer, scheduler_stack_pointer);
}

// Waits until *generation changes.
void wait(const unsigned &generation) {
    fiber->waits_for = &generation;
    fiber->seen = generation;
    leave();
    fiber->waits_for = nullptr;
}

void finish_exchange(Warp &warp) {
    warp.arrived = 0;
    ++warp.generation;
}

void finish_block_barrier() {
    arrived_threads = 0;
    ++block_generation;
    any_predicate[block_generation & 1] = 0;
}

Error misaligned(const void *p, size_t bytes, const std::string &access) {
    return Error(INFINI_STATUS_INTERNAL_ERROR,
                 message("infini: emulated kernel: misaligned address: ", access, " at a multiple of ",
                         size_t{1} << __builtin_ctzll(reinterpret_cast<uintptr_t>(p)), " bytes, must be one of ", bytes,
                         " (block ", block_index.x, ", ", block_index.y, ", ", block_index.z, "; thread ",
                         fiber->thread.x, ", ", fiber->thread.y, ", ", fiber->thread.z, ")"));
}

void run_fiber() {
    try {
        (*kernel_body)();
        if (fiber->dependency_syncs != 1) {
            throw Error(
                INFINI_STATUS_INTERNAL_ERROR,
                message("infini: emulated kernel: every thread must call cuda::grid_dependency_sync() once, got ",
                        fiber->dependency_syncs, " calls (block ", block_index.x, ", ", block_index.y, ", ",
                        block_index.z, "; thread ", fiber->thread.x, ", ", fiber->thread.y, ", ", fiber->thread.z,
                        ")"));
        }
    } catch (...) { // no exception may leave this stack
        failure = std::current_exception();
    }
    fiber->done = true;
    // Barriers do not wait for threads that have returned.
    Warp &warp = warps[fiber->warp];
    warp.live &= ~(1u << fiber->lane);
    if (warp.live != 0 && warp.arrived == warp.live) {
        finish_exchange(warp);
    }
    --live_threads;
    if (live_threads > 0 && arrived_threads == live_threads) {
        finish_block_barrier();
    }
    leave();
    __builtin_unreachable();
}

void start(Fiber &started, int index) {
    auto *top = reinterpret_cast<void **>(stack_of(index) + kStackBytes - 64);
    // What infini_switch_stack pops, then the return address; the stack is aligned as after a call.
    top -= 8;
    std::memset(top, 0, 8 * sizeof *top);
    top[6] = reinterpret_cast<void *>(&run_fiber);
    started.stack_pointer = top;
}

void run_block(const std::vector<int> &order) {
    size_t left = fibers.size();
    while (left > 0) {
        bool progress = false;
        for (const int index : order) {
            Fiber &next = fibers[index];
            if (next.done || (next.waits_for != nullptr && *next.waits_for == next.seen)) {
                continue;
            }
            fiber = &next;
            infini_switch_stack(&scheduler_stack_pointer, next.stack_pointer);
            fiber = nullptr;
            progress = true;
            left -= next.done;
            if (failure) {
                std::rethrow_exception(std::exchange(failure, nullptr));
            }
        }
        if (!progress) {
            throw Error(
                INFINI_STATUS_INTERNAL_ERROR,
                message("infini: emulated kernel: a barrier or a shuffle was not reached by all threads (block ",
                        block_index.x, ", ", block_index.y, ", ", block_index.z, "; ", arrived_threads, " of ",
                        live_threads, " wait at the block's barrier)"));
        }
    }
}

} // namespace

void refuse_misaligned(const void *p, size_t bytes, const char *access) {
    throw misaligned(p, bytes, access);
}

void *dynamic_shared() {
    return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(shared_memory.data()) + 127) / 128 * 128);
}

void sync_block() {
    if (++arrived_threads == live_threads) {
        finish_block_barrier();
    } else {
        wait(block_generation);
    }
}

int sync_block_or(int predicate) {
    int &any = any_predicate[block_generation & 1];
    any |= predicate != 0;
    sync_block();
    const int result = any;
    sync_block();
    return result;
}

uint64_t exchange(unsigned mask, uint64_t bits, int source) {
    Warp &warp = warps[fiber->warp];
    const unsigned self = 1u << fiber->lane;
    if ((mask & self) == 0 || (mask & warp.live) != warp.live) {
        throw Error(INFINI_STATUS_INTERNAL_ERROR,
                    "infini: emulated kernel: the mask of a shuffle must name all live lanes");
    }
    if (source >= 0 && (warp.live & 1u << source) == 0) {
        throw Error(INFINI_STATUS_INTERNAL_ERROR,
                    message("infini: emulated kernel: a shuffle reads lane ", source, ", which has returned"));
    }
    uint64_t *const values = warp.values[fiber->exchanges++ & 1];
    values[fiber->lane] = bits;
    warp.arrived |= self;
    if (warp.arrived == warp.live) {
        finish_exchange(warp);
    } else {
        wait(warp.generation);
    }
    return source < 0 ? 0 : values[source];
}

const float (*gather(const float (&numbers)[16]))[16] {
    auto &all = warps[fiber->warp].numbers[fiber->exchanges & 1];
    std::memcpy(all[fiber->lane], numbers, sizeof numbers);
    exchange(0xffffffffu, 0, -1);
    return all;
}

unsigned ballot(unsigned mask, bool predicate) {
    unsigned bits = 0;
    const unsigned live = warps[fiber->warp].live;
    for (int i = 0; i < kWarp; ++i) { // 32 exchanges: slow, but simple
        bits |= (live >> i & 1) != 0 && exchange(mask, predicate, i) != 0 ? 1u << i : 0;
    }
    return bits & mask;
}

void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &kernel) {
    const int64_t threads = static_cast<int64_t>(block.x) * block.y * block.z;
    if (threads < 1 || threads > kMaxThreads || grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffff ||
        grid.y > 65535 || grid.z > 65535 || block.z > 64 || shared > kMaxShared) {
        throw Error(INFINI_STATUS_INTERNAL_ERROR,
                    message("infini: emulated launch: a grid of ", grid.x, " x ", grid.y, " x ", grid.z, " blocks of ",
                            block.x, " x ", block.y, " x ", block.z, " threads with ", shared,
                            " bytes of shared memory"));
    }
    const std::lock_guard<std::mutex> lock(one_grid);
    block_dim = block;
    grid_dim = grid;
    kernel_body = &kernel;
    std::vector<int> order(static_cast<size_t>(threads));
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<int>(i);
    }
    const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
    for (int64_t number = 0; number < blocks; ++number) {
        block_index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                       static_cast<unsigned>(number / grid.x / grid.y)};
        fibers.assign(order.size(), {});
        warps.assign((order.size() + kWarp - 1) / kWarp, {});
        shared_memory.assign(shared + 256, 0xff); // uninitialized memory reads as NaN
        live_threads = static_cast<unsigned>(threads);
        arrived_threads = block_generation = 0;
        any_predicate[0] = any_predicate[1] = 0;
        for (int i = 0; i < threads; ++i) {
            Fiber &made = fibers[i];
            made.thread = {static_cast<unsigned>(i) % block.x, static_cast<unsigned>(i) / block.x % block.y,
                           static_cast<unsigned>(i) / block.x / block.y};
            made.warp = i / kWarp;
            made.lane = i % kWarp;
            warps[made.warp].live |= 1u << made.lane;
            start(made, i);
        }
        ++blocks_begun;
        std::shuffle(order.begin(), order.end(), shuffler);
        run_block(order);
    }
}

} // namespace infini::emulation

// The compiler calls this before an unaligned access through a typed pointer (-fsanitize=alignment) and assumes that it
// does not throw. So the thread stops here, and the scheduler throws.
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const infini::emulation::TypedAccess *access, const void *p) {
    using namespace infini::emulation;
    const std::string text =
        std::string("an access to ") + access->type->name + " in " + access->file + ":" + std::to_string(access->line);
    const size_t bytes = size_t{1} << access->log_alignment;
    if (fiber == nullptr) {
        std::fprintf(stderr, "infini: emulation: misaligned address %p: %s, must be a multiple of %zu bytes\n", p,
                     text.c_str(), bytes);
        std::abort();
    }
    failure = std::make_exception_ptr(misaligned(p, bytes, text));
    leave();
    __builtin_unreachable();
}
