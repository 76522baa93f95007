// One growing block of scratch memory for each thread.
#include "scratch.h"

#include <cstdlib>

#include "status.h"

namespace infini::cpu {

namespace {

struct Block {
    void *data = nullptr;
    size_t bytes = 0;
    ~Block() { std::free(data); }
};

thread_local Block block;
thread_local const char *op = nullptr;

} // namespace

void *scratch(size_t bytes) {
    if (bytes > block.bytes) {
        const size_t rounded = (bytes + 4095) / 4096 * 4096;
        void *grown = std::aligned_alloc(64, rounded);
        if (grown == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR,
                        message("infini", op == nullptr ? "" : "::", op == nullptr ? "" : op, ": no memory for ", bytes,
                                " bytes of scratch"));
        }
        std::free(block.data);
        block.data = grown;
        block.bytes = rounded;
    }
    return block.data;
}

void scratch_is_for(const char *name) {
    op = name;
}

} // namespace infini::cpu
