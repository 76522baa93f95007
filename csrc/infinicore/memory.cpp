// Memory: calls its deleter once, when it is destroyed.
#include "infinicore/memory.hpp"

#include "thread_state.h"

namespace infinicore {

Memory::Memory(std::byte *data, size_t size, Device device, Deleter deleter, bool pin_memory)
    : data_(data), size_(size), device_(device), deleter_(std::move(deleter)), pinned_(pin_memory) {}

Memory::~Memory() {
    if (deleter_) {
        deleter_(data_);
    }
}

bool Memory::is_recorded_now() const {
    const Recording *const recording = current_recording();
    return recording != nullptr && is_of(recording->pool->ran);
}

void Memory::set_recorded_now() {
    if (const Recording *const recording = current_recording()) {
        graph_ran_ = recording->pool->ran;
    }
}

} // namespace infinicore
