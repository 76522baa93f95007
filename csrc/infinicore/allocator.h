// The caches that memory comes from: one for each device and kind of memory. A freed block belongs to the stream that it
// was allocated for, whose later work uses it again without waiting; another stream gets it when that stream is gone.
// Method: stream-ordered reuse as in cudaMallocAsync and PyTorch's caching allocator; blocks are not split.
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

// A stream of this library: an id that is never used again, since a driver may give a new stream an old one's address.
struct StreamId {
    uint64_t id = 0; // 0: none
    infinirtStream_t stream = nullptr;
};

struct Block {
    std::byte *data = nullptr;
    size_t size = 0; // bytes; what Memory gets may be less
    StreamId home;   // free for what this stream does later
    // Once these events are complete: where other streams, of what the host writes also the home stream, were when it was
    // freed.
    std::vector<infinirtEvent_t> freed{};
};

class CachingAllocator {
public:
    enum class Kind { Device, Pinned };

    // The cache of a device; pageable host memory is that of the CPU. Made at first use, never destroyed: threads may still
    // free at exit.
    static CachingAllocator &of(Device device, Kind kind = Kind::Device);

    // A block of at least `size` bytes, at least 1, for work of `stream`, whose device is current.
    Block *allocate(size_t size, const StreamId &stream);
    // `stream`: the freeing thread's own of this device; it may be none.
    void free(Block *block, const StreamId &stream);

    void retire(const StreamId &stream); // it is done with all its work and about to be destroyed
    MemoryStats stats();
    void trim(); // gives free blocks back to the system; waits for the device

    Device device() const { return device_; }

private:
    CachingAllocator(Device device, Kind kind) : device_(device), kind_(kind) {}
    Block *take_cached(size_t rounded, const StreamId &stream);
    // What the block's next user waits for.
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

// Memory of a graph: blocks that are freed while it is recorded, or captured, go to what is recorded later; all of them go
// back to the cache at its end, with the last Memory that shares it.
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
