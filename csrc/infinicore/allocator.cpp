// The caching allocators: which free block an allocation gets, and what it waits for before the block is used.
#include "allocator.h"

#include <algorithm>

#include "error.h"
#include "thread_state.h"

namespace infinicore {

namespace {

constexpr size_t kSmallest = 512;
constexpr size_t kPage = size_t{2} << 20;

// Up to 2 MiB a block is at most an eighth larger than requested, so that similar sizes share blocks; beyond, sizes are
// rounded to pages of 2 MiB.
size_t rounded_size(size_t size) {
    if (size <= kSmallest) {
        return kSmallest;
    }
    size_t step = kPage;
    if (size < kPage) {
        step = (size_t{1} << (63 - __builtin_clzll(size - 1))) / 8;
    }
    if (size > SIZE_MAX - step) {
        return SIZE_MAX;
    }
    return (size + step - 1) / step * step;
}

std::string bytes(size_t count) {
    std::string text = std::to_string(count) + " bytes";
    if (count >= kPage) {
        text += " (" + std::to_string(count >> 20) + " MiB)";
    }
    return text;
}

void forget(Block &block) {
    for (const infinirtEvent_t event : block.freed) {
        infinirtEventDestroy(event);
    }
    block.freed.clear();
}

} // namespace

CachingAllocator &CachingAllocator::of(Device device, Kind kind) {
    // Read without a lock once created: two pointers per device.
    constexpr size_t kMaxIndex = 64;
    static std::atomic<CachingAllocator *> made[static_cast<size_t>(Device::Type::COUNT)][kMaxIndex][2];
    const auto type = static_cast<size_t>(device.getType());
    if (type >= static_cast<size_t>(Device::Type::COUNT) || device.getIndex() >= kMaxIndex) {
        fail("infinicore: device must be one of the types CPU to QY with an index below ", kMaxIndex, ", got type ",
             type, ", index ", device.getIndex());
    }
    std::atomic<CachingAllocator *> &entry = made[type][device.getIndex()][static_cast<size_t>(kind)];
    CachingAllocator *found = entry.load(std::memory_order_acquire);
    if (found == nullptr) {
        auto *const fresh = new CachingAllocator(device, kind);
        if (entry.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) {
            return *fresh;
        }
        delete fresh;
    }
    return *found;
}

void *CachingAllocator::malloc_or_null(size_t size) {
    void *data = nullptr;
    const infiniStatus_t status = kind_ == Kind::Device ? infinirtMalloc(&data, size) : infinirtMallocHost(&data, size);
    return status == INFINI_STATUS_SUCCESS ? data : nullptr;
}

Block *CachingAllocator::take_cached(size_t rounded, const StreamId &stream) {
    auto entry = free_.lower_bound(rounded);
    if (entry == free_.end() || entry->first - rounded > rounded / 8) {
        return nullptr;
    }
    // Never waits for what another stream had queued: it may wait for this one, as a rank of an all-reduce does.
    std::vector<Block *> &blocks = entry->second;
    const auto usable = [&](const Block *block) {
        if (block->home.id != stream.id && alive_.count(block->home.id) != 0) {
            return false;
        }
        return std::all_of(block->freed.begin(), block->freed.end(), [](infinirtEvent_t event) {
            infinirtEventStatus_t status = INFINIRT_EVENT_NOT_READY;
            return infinirtEventQuery(event, &status) == INFINI_STATUS_SUCCESS && status == INFINIRT_EVENT_COMPLETE;
        });
    };
    // The latest block is most likely in a cache. Otherwise take the one that has waited longest.
    const auto found =
        usable(blocks.back()) ? std::prev(blocks.end()) : std::find_if(blocks.begin(), blocks.end(), usable);
    if (found == blocks.end()) {
        return nullptr;
    }
    Block *const block = *found;
    blocks.erase(found);
    if (blocks.empty()) {
        free_.erase(entry);
    }
    forget(*block);
    return block;
}

Block *CachingAllocator::allocate(size_t size, const StreamId &stream) {
    const size_t rounded = rounded_size(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.allocations;
    alive_.try_emplace(stream.id, stream.stream);
    Block *block = take_cached(rounded, stream);
    if (block != nullptr) {
        ++stats_.cache_hits;
        stats_.cached -= block->size;
    } else {
        void *data = malloc_or_null(rounded);
        std::string trimmed = " after the cache was trimmed";
        if (data == nullptr) {
            try {
                trim_locked();
            } catch (const std::exception &error) { // for example while a stream of the device is captured
                trimmed = message(", which could not be trimmed: ", error.what());
            }
            data = malloc_or_null(rounded);
        }
        if (data == nullptr) {
            const std::string reason = infiniGetLastErrorMessage();
            const char *const what = kind_ == Kind::Pinned ? " of pinned host memory for " : " of memory of ";
            throw infini::Error(INFINI_STATUS_INTERNAL_ERROR,
                                message("infinicore::context: ", bytes(size), what, device_.toString(),
                                        " cannot be had: ", bytes(stats_.in_use), " are in use, ", bytes(stats_.cached),
                                        " are cached", trimmed, " (", reason, ")"));
        }
        block = new Block{static_cast<std::byte *>(data), rounded, {}};
    }
    block->home = stream;
    stats_.in_use += block->size;
    stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
    return block;
}

void CachingAllocator::free(Block *block, const StreamId &stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream.id != 0 && stream.id != block->home.id) {
        mark(*block, stream);
    }
    // The host writes its memory at once, so it cannot queue behind the home stream.
    const bool is_host =
        kind_ == Kind::Pinned || (device_.getType() == Device::Type::CPU && ThreadState::cpu_streams_queue());
    const auto home = is_host ? alive_.find(block->home.id) : alive_.end();
    if (home != alive_.end()) {
        mark(*block, block->home);
    }
    stats_.in_use -= block->size;
    stats_.cached += block->size;
    free_[block->size].push_back(block);
}

void CachingAllocator::mark(Block &block, const StreamId &stream) {
    // An event belongs to the current device, which need not be this allocator's when a block is freed.
    infiniDevice_t type = INFINI_DEVICE_CPU;
    int index = 0;
    infinirtGetDevice(&type, &index);
    infinirtSetDevice(static_cast<infiniDevice_t>(device_.getType()), static_cast<int>(device_.getIndex()));
    infinirtEvent_t freed = nullptr;
    if (infinirtEventCreateWithFlags(&freed, INFINIRT_EVENT_DISABLE_TIMING) == INFINI_STATUS_SUCCESS &&
        infinirtEventRecord(freed, stream.stream) == INFINI_STATUS_SUCCESS) {
        block.freed.push_back(freed);
    } else {
        infinirtStreamSynchronize(stream.stream);
        infinirtEventDestroy(freed);
    }
    infinirtSetDevice(type, index);
}

void CachingAllocator::retire(const StreamId &stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    alive_.erase(stream.id);
}

MemoryStats CachingAllocator::stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
}

void CachingAllocator::trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    trim_locked();
}

void CachingAllocator::trim_locked() {
    for (auto &entry : free_) {
        for (std::vector<Block *> &blocks = entry.second; !blocks.empty(); blocks.pop_back()) {
            Block *const block = blocks.back();
            // Both calls wait for the device's queued work. A block that cannot be freed stays in the cache.
            check(kind_ == Kind::Device ? infinirtFree(block->data) : infinirtFreeHost(block->data));
            forget(*block);
            stats_.cached -= block->size;
            delete block;
        }
    }
    free_.clear();
}

std::shared_ptr<Memory> GraphPool::allocate(CachingAllocator &allocator, size_t size, Device device, bool pinned) {
    const size_t rounded = rounded_size(size);
    Block *block = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto entry = free_.find({&allocator, rounded});
        if (entry != free_.end() && !entry->second.empty()) {
            block = entry->second.back();
            entry->second.pop_back();
        }
    }
    if (block == nullptr) {
        block = allocator.allocate(rounded, ThreadState::current()->stream(allocator.device()));
        const std::lock_guard<std::mutex> lock(mutex_);
        blocks_.emplace_back(&allocator, block);
    }
    auto memory = std::make_shared<Memory>(
        block->data, size, device,
        [pool = shared_from_this(), block, of = std::pair{&allocator, rounded}](std::byte *) {
            const std::lock_guard<std::mutex> lock(pool->mutex_);
            pool->free_[of].push_back(block);
        },
        pinned);
    memory->set_pool(ran);
    return memory;
}

GraphPool::~GraphPool() {
    ThreadState *const state = ThreadState::current();
    for (const auto &[allocator, block] : blocks_) {
        allocator->free(block, state == nullptr ? StreamId{} : state->stream(allocator->device(), false));
    }
}

} // namespace infinicore
