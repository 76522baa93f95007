// Memory: a block of device, host or pinned host memory with its deleter. context::allocateMemory() and its variants
// allocate it from caches of the device; tensors share it.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>

#include "device.hpp"

namespace infinicore {

class Memory {
public:
    using Deleter = std::function<void(std::byte *)>;

    // `deleter(data)` is called once, when the last owner is destroyed; an empty deleter frees nothing.
    Memory(std::byte *data, size_t size, Device device, Deleter deleter, bool pin_memory = false);
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    std::byte *data() { return data_; }
    Device device() const { return device_; }
    size_t size() const { return size_; } // bytes
    bool is_pinned() const { return pinned_; }

    // (Additions to InfiniCore's interface, to the end of the class.)
    // Whether the memory is freed with this object; if not, it may be larger than size().
    bool is_owned() const { return static_cast<bool>(deleter_); }
    // Whether this was allocated in the recording of a graph that has not run yet: it has no contents.
    bool is_recorded_only() const { return graph_ran_ != nullptr && !graph_ran_->load(std::memory_order_acquire); }
    // Whether it belongs to the graph that this thread records.
    bool is_recorded_now() const;
    // Whether it belongs to the graph whose first run sets `ran`.
    bool is_of(const std::shared_ptr<std::atomic<bool>> &ran) const { return graph_ran_ == ran; }
    // Whether it is also a block of that graph's pool, which lives as long as the graph.
    bool is_pooled_by(const std::shared_ptr<std::atomic<bool>> &ran) const { return is_pooled_ && is_of(ran); }
    void set_pool(std::shared_ptr<const std::atomic<bool>> ran) {
        graph_ran_ = std::move(ran);
        is_pooled_ = true;
    }
    // Assigns it to the graph that this thread records, if any, which writes it but does not own it.
    void set_recorded_now();

private:
    std::byte *data_;
    size_t size_;
    Device device_;
    Deleter deleter_;
    bool pinned_;
    bool is_pooled_ = false;
    std::shared_ptr<const std::atomic<bool>> graph_ran_;
};

// The memory of one device, in bytes except for the last two. (An addition to InfiniCore's interface.)
struct MemoryStats {
    size_t in_use = 0;      // by Memory objects that are alive, rounded up to the caches' block sizes
    size_t cached = 0;      // free blocks that the caches keep
    size_t peak_in_use = 0; // the most that was in use at once
    size_t allocations = 0; // number of allocations
    size_t cache_hits = 0;  // of these, from a cache
};

} // namespace infinicore
