// HandleTable: the live objects of one kind behind the C ABI's handles, by address. A handle is looked up before it is
// dereferenced, so an unknown or destroyed one is rejected. A lookup takes a lock that is rarely contended: addresses
// are spread over shards.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace infini {

// Values are held by shared_ptr: an object that was looked up stays valid while in use, even if another thread destroys
// its handle.
template <typename Value> class HandleTable {
public:
    // Returns the value's handle: its address, or the given address, which no live value may have.
    void *insert(std::shared_ptr<Value> value) {
        void *const address = value.get();
        return insert(address, std::move(value));
    }
    void *insert(void *address, std::shared_ptr<Value> value) {
        Shard &shard = shard_of(address);
        const std::lock_guard<std::mutex> lock(shard.mutex);
        shard.values.emplace(address, std::move(value));
        return address;
    }

    // Returns nullptr if the handle is not live.
    std::shared_ptr<Value> find(const void *address) {
        Shard &shard = shard_of(address);
        const std::lock_guard<std::mutex> lock(shard.mutex);
        const auto found = shard.values.find(address);
        return found == shard.values.end() ? nullptr : found->second;
    }

    // Removes the value and returns it; nullptr if the handle is not live.
    std::shared_ptr<Value> erase(const void *address) {
        Shard &shard = shard_of(address);
        const std::lock_guard<std::mutex> lock(shard.mutex);
        const auto found = shard.values.find(address);
        if (found == shard.values.end()) {
            return nullptr;
        }
        std::shared_ptr<Value> value = std::move(found->second);
        shard.values.erase(found);
        return value;
    }

private:
    static constexpr int kShards = 32;
    struct alignas(64) Shard {
        std::mutex mutex;
        std::unordered_map<const void *, std::shared_ptr<Value>> values;
    };

    Shard &shard_of(const void *address) { return shards_[(reinterpret_cast<uintptr_t>(address) >> 6) % kShards]; }

    Shard shards_[kShards];
};

} // namespace infini
