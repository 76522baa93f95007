// The caching allocators, one per device and kind of memory. A freed block belongs to the stream that it was allocated
// for: that stream's later work reuses it without waiting; other streams get it only after that stream is gone. Method:
// stream-ordered reuse as in cudaMallocAsync and PyTorch's caching allocator; blocks are not split.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "infinicore/memory.hpp"
#include "infinirt.h"

namespace infinicore {

// A stream of this library. Its id is never reused, because a driver may give a new stream an old one's address.
struct StreamId {
    uint64_t id = 0; // 0: no stream
    infinirtStream_t stream = nullptr;
};

struct Block {
    std::byte *data = nullptr;
    size_t size = 0; // bytes; at least the size requested
    StreamId home;   // the block is free for this stream's later work
    // The next user waits for these events. They mark where other streams were when the block was freed; for memory
    // that the host writes, also where the home stream was.
    std::vector<infinirtEvent_t> freed{};
};

class CachingAllocator {
public:
    enum class Kind { Device, Pinned };

    // The allocator of a device; pageable host memory has the CPU's. Created at first use, never destroyed: threads may
    // still free at exit.
    static CachingAllocator &of(Device device, Kind kind = Kind::Device);

    // Returns a block of at least `size` bytes (and at least 1) for work of `stream`, whose device must be current.
    Block *allocate(size_t size, const StreamId &stream);
    // `stream`: the freeing thread's stream of this device, or none.
    void free(Block *block, const StreamId &stream);

    void retire(const StreamId &stream); // the stream's work is done, and it is about to be destroyed
    MemoryStats stats();
    void trim(); // returns free blocks to the system; waits for the device

    Device device() const { return device_; }

private:
    CachingAllocator(Device device, Kind kind) : device_(device), kind_(kind) {}
    Block *take_cached(size_t rounded, const StreamId &stream);
    // Records the events that the block's next user waits for.
    void mark(Block &block, const StreamId &stream);
    void trim_locked();
    void *malloc_or_null(size_t size);

    const Device device_;
    const Kind kind_;
    std::mutex mutex_;
    std::map<size_t, std::vector<Block *>> free_; // by size
    std::unordered_map<uint64_t, infinirtStream_t> alive_;
    MemoryStats stats_;
};

// A graph's memory. Blocks freed while the graph is recorded or captured are reused by what is recorded later. All
// blocks return to the cache with the graph's end and the last Memory that shares the pool.
class GraphPool : public std::enable_shared_from_this<GraphPool> {
public:
    GraphPool() : ran(std::make_shared<std::atomic<bool>>(false)) {}
    ~GraphPool();

    std::shared_ptr<Memory> allocate(CachingAllocator &allocator, size_t size, Device device, bool pinned);
    const std::shared_ptr<std::atomic<bool>> ran; // whether the graph has run

private:
    std::mutex mutex_;
    std::map<std::pair<CachingAllocator *, size_t>, std::vector<Block *>> free_;
    std::vector<std::pair<CachingAllocator *, Block *>> blocks_;
};

} // namespace infinicore
