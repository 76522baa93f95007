// Memory: a piece of device, host or pinned host memory with what frees it. context::allocateMemory() and its kin make
// them, from caches that belong to a device; tensors share them.
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

    // `deleter(data)` is called once, when the last owner lets go; an empty one frees nothing.
    Memory(std::byte *data, size_t size, Device device, Deleter deleter, bool pin_memory = false);
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    std::byte *data() { return data_; }
    Device device() const { return device_; }
    size_t size() const { return size_; } // bytes
    bool is_pinned() const { return pinned_; }

    // (Additions to InfiniCore's interface, all that follows.) Whether it is freed with this object; what is not may be larger than size() says.
    bool is_owned() const { return static_cast<bool>(deleter_); }
    // Whether this was allocated while a graph was recorded that has not run yet: its contents are not there.
    bool is_recorded_only() const { return graph_ran_ != nullptr && !graph_ran_->load(std::memory_order_acquire); }
    // Whether it belongs to the graph that this thread records.
    bool is_recorded_now() const;
    // Whether it belongs to the graph whose first run sets `ran`.
    bool is_of(const std::shared_ptr<std::atomic<bool>> &ran) const { return graph_ran_ == ran; }
    // Whether it is a block of that graph's pool, too, which lives as long as the graph.
    bool is_pooled_by(const std::shared_ptr<std::atomic<bool>> &ran) const { return is_pooled_ && is_of(ran); }
    void set_pool(std::shared_ptr<const std::atomic<bool>> ran) {
        graph_ran_ = std::move(ran);
        is_pooled_ = true;
    }
    // Lets it belong to the graph that this thread records, where there is one, which writes it but does not own it.
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

// What the caches of one device hold, in bytes but for the last two. (An addition to InfiniCore's interface.)
struct MemoryStats {
    size_t in_use = 0;      // by Memory objects that are alive, rounded up to the caches' block sizes
    size_t cached = 0;      // free blocks that the caches keep
    size_t peak_in_use = 0; // the most that was in use at once
    size_t allocations = 0; // pieces of memory asked for
    size_t cache_hits = 0;  // of these, served from a cache
};

} // namespace infinicore
