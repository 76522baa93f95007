// HandleTable: the objects of one kind that the C ABI has handed out and not yet taken back, by address.
// A pointer that comes in is looked up before it is followed, so one that is foreign, or was destroyed, is refused
// instead of read. A lookup costs a lock that is hardly ever contended: addresses are spread over shards.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace infini {

// Value is held by shared_ptr: what was looked up stays valid while in use, even if it is destroyed meanwhile.
template <typename Value> class HandleTable {
public:
    // The address that stands for the value from now on: its own, or another that no live value has.
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

    // nullptr: not live.
    std::shared_ptr<Value> find(const void *address) {
        Shard &shard = shard_of(address);
        const std::lock_guard<std::mutex> lock(shard.mutex);
        const auto found = shard.values.find(address);
        return found == shard.values.end() ? nullptr : found->second;
    }

    // Takes the value out; nullptr: it was not live.
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
