// Memory of device infini: the allocator behind torch.empty(device="infini") and torch.accelerator's statistics, which
// allocates from the backing device's allocator, and the allocator of pinned host memory.
#include "device.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>

namespace infini::device {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
using Stats = c10::CachingDeviceAllocator::DeviceStats;

// Storages of one device, counted since the start; the current amount is what was added minus what was removed. The CPU
// caches nothing, so reserved equals allocated.
struct Counts {
    std::atomic<int64_t> added_bytes{0}, removed_bytes{0}, peak_bytes{0};
    std::atomic<int64_t> added{0}, removed{0}, peak{0};
    std::atomic<int64_t> ooms{0};
    // The counts at the last reset of the accumulated statistics.
    std::atomic<int64_t> from_added_bytes{0}, from_removed_bytes{0}, from_added{0}, from_removed{0};

    int64_t bytes() const { return added_bytes.load(kRelaxed) - removed_bytes.load(kRelaxed); }
    int64_t storages() const { return added.load(kRelaxed) - removed.load(kRelaxed); }
};

constexpr int kMaxDevices = 64;
std::array<Counts, kMaxDevices> counts;

Counts &counts_of(c10::DeviceIndex index) {
    return counts[index < 0 ? 0 : index % kMaxDevices];
}

void raise_to(std::atomic<int64_t> &peak, int64_t value) {
    int64_t seen = peak.load(kRelaxed);
    while (seen < value && !peak.compare_exchange_weak(seen, value, kRelaxed)) {
    }
}

// (available, total) bytes of this host.
std::pair<size_t, size_t> host_memory() {
    size_t available = 0, total = 0;
    if (FILE *file = std::fopen("/proc/meminfo", "r")) {
        char line[128];
        while (std::fgets(line, sizeof line, file)) {
            size_t kib = 0;
            if (std::sscanf(line, "MemAvailable: %zu kB", &kib) == 1) {
                available = kib * 1024;
            } else if (std::sscanf(line, "MemTotal: %zu kB", &kib) == 1) {
                total = kib * 1024;
            }
        }
        std::fclose(file);
    }
    return {available, total};
}

c10::DeviceAllocator *allocator_below() {
    return c10::getDeviceAllocator(backing.type);
}

class DeviceAllocator final : public c10::DeviceAllocator {
public:
    c10::DataPtr allocate(size_t bytes) override {
        check_fork();
        const c10::DeviceIndex index = current_index();
        c10::Allocator *const below_ =
            backing.type == c10::kCPU ? c10::GetCPUAllocator() : c10::GetAllocator(backing.type);
        c10::DataPtr data;
        try {
            const InVendorMemory in_vendor_memory;
            data = below_->allocate(bytes);
        } catch (const c10::OutOfMemoryError &) {
            throw; // CUDA's own message says how much was requested and how much is free
        } catch (const c10::Error &error) {
            out_of_memory(error.what_without_backtrace(), static_cast<int64_t>(bytes));
        }
        return owning(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                            below_, true),
                      index, true);
    }

    void copy_data(void *to, const void *from, size_t bytes) const override {
        if (backing.type == c10::kCPU) {
            default_copy_data(to, from, bytes);
        } else {
            c10::GetAllocator(backing.type)->copy_data(to, from, bytes);
        }
    }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t pool) override {
        if (backing.type != c10::kCPU) {
            allocator_below()->emptyCache(pool);
        }
    }

    void recordStream(const c10::DataPtr &pointer, c10::Stream stream) override {
        if (backing.type != c10::kCPU) { // on the CPU an op is done when its call returns, so nothing is in flight
            const auto *twin = static_cast<c10::StorageImpl *>(pointer.get_context());
            allocator_below()->recordStream(
                twin->data_ptr(), c10::Stream(c10::Stream::UNSAFE, below(stream.device_index()), stream.id()));
        }
    }

    Stats getDeviceStats(c10::DeviceIndex index) override {
        if (backing.type != c10::kCPU) {
            return allocator_below()->getDeviceStats(index);
        }
        const Counts &now = counts_of(index);
        Stats stats;
        const auto fill = [](c10::CachingAllocator::StatArray &array, int64_t current, int64_t peak, int64_t added,
                             int64_t removed) {
            auto &stat = array[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
            stat.current = current;
            stat.peak = peak;
            stat.allocated = added;
            stat.freed = removed;
        };
        for (auto *array :
             {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
            fill(*array, now.bytes(), now.peak_bytes, now.added_bytes - now.from_added_bytes,
                 now.removed_bytes - now.from_removed_bytes);
        }
        for (auto *array : {&stats.allocation, &stats.active, &stats.segment}) {
            fill(*array, now.storages(), now.peak, now.added - now.from_added, now.removed - now.from_removed);
        }
        stats.num_ooms = now.ooms;
        stats.num_device_alloc = now.added - now.from_added;
        stats.num_device_free = now.removed - now.from_removed;
        return stats;
    }

    void resetAccumulatedStats(c10::DeviceIndex index) override {
        if (backing.type != c10::kCPU) {
            return allocator_below()->resetAccumulatedStats(index);
        }
        Counts &now = counts_of(index);
        now.from_added_bytes = now.added_bytes.load();
        now.from_removed_bytes = now.removed_bytes.load();
        now.from_added = now.added.load();
        now.from_removed = now.removed.load();
        now.ooms = 0;
    }

    void resetPeakStats(c10::DeviceIndex index) override {
        if (backing.type != c10::kCPU) {
            return allocator_below()->resetPeakStats(index);
        }
        Counts &now = counts_of(index);
        now.peak_bytes = now.bytes();
        now.peak = now.storages();
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        return backing.type == c10::kCPU ? host_memory() : allocator_below()->getMemoryInfo(index);
    }
};

// Pinned host memory comes from infinirt. On the CPU ordinary memory serves as well, but is_pinned() must know what was
// asked for.
class PinnedAllocator final : public at::HostAllocator {
public:
    c10::DataPtr allocate(size_t bytes) override {
        void *pointer = nullptr;
        if (bytes != 0) {
            const infiniStatus_t status = infinirtMallocHost(&pointer, bytes);
            if (status != INFINI_STATUS_SUCCESS) {
                out_of_memory(infiniGetLastErrorMessage(), static_cast<int64_t>(bytes));
            }
            const std::lock_guard<std::mutex> lock(mutex_);
            ranges_[pointer] = bytes;
            total_ += static_cast<int64_t>(bytes);
            peak_ = std::max(peak_, total_);
        }
        return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    bool record_event(void *, void *, c10::Stream) override { return false; }
    void empty_cache() override {}

    at::HostStats get_stats() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        at::HostStats stats;
        stats.allocated_bytes.current = stats.active_bytes.current = total_;
        stats.allocated_bytes.peak = stats.active_bytes.peak = peak_;
        return stats;
    }

    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        peak_ = total_;
    }

    // Whether the address lies anywhere inside this allocator's memory: views and slices are pinned too.
    bool has(const void *pointer) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto above = ranges_.upper_bound(const_cast<void *>(pointer));
        if (above == ranges_.begin()) {
            return false;
        }
        const auto &[start, bytes] = *std::prev(above);
        return static_cast<const char *>(pointer) < static_cast<char *>(start) + bytes;
    }

private:
    static void free_pinned(void *pointer);

    std::mutex mutex_;
    std::map<void *, size_t> ranges_;
    int64_t total_ = 0, peak_ = 0;
};

// Never destroyed: tensors may outlive the end of main().
DeviceAllocator &the_allocator = *new DeviceAllocator;
PinnedAllocator &the_pinned = *new PinnedAllocator;

void PinnedAllocator::free_pinned(void *pointer) {
    if (pointer != nullptr) {
        {
            const std::lock_guard<std::mutex> lock(the_pinned.mutex_);
            const auto found = the_pinned.ranges_.find(pointer);
            the_pinned.total_ -= static_cast<int64_t>(found->second);
            the_pinned.ranges_.erase(found);
        }
        infinirtFreeHost(pointer);
    }
}

} // namespace

void count_added(c10::DeviceIndex index, size_t bytes) {
    Counts &now = counts_of(index);
    now.added_bytes.fetch_add(static_cast<int64_t>(bytes), kRelaxed);
    now.added.fetch_add(1, kRelaxed);
    raise_to(now.peak_bytes, now.bytes());
    raise_to(now.peak, now.storages());
}

void count_removed(c10::DeviceIndex index, size_t bytes) {
    Counts &now = counts_of(index);
    now.removed_bytes.fetch_add(static_cast<int64_t>(bytes), kRelaxed);
    now.removed.fetch_add(1, kRelaxed);
}

void out_of_memory(const std::string &cause, int64_t asked) {
    counts_of(0).ooms.fetch_add(1);
    const auto [available, total] = host_memory();
    std::string said = asked < 0 ? std::string() : c10::str("Tried to allocate ", asked, " bytes. ");
    TORCH_CHECK_WITH(OutOfMemoryError, false, "infini out of memory. ", said, available, " bytes of ", total,
                     " are free on the backing device, ", counts_of(0).bytes(), " bytes are held by infini tensors (",
                     cause, ")");
}

c10::DeviceAllocator *device_allocator() {
    return &the_allocator;
}

at::Allocator *pinned_allocator() {
    return backing.type == c10::kCPU ? &the_pinned : at::getHostAllocator(backing.type);
}

bool is_pinned(const void *pointer) {
    return backing.type == c10::kCPU ? the_pinned.has(pointer) : at::detail::getCUDAHooks().isPinnedPtr(pointer);
}

void register_allocators() {
    c10::SetAllocator(kInfini, &the_allocator);
    at::setHostAllocator(kInfini, backing.type == c10::kCPU ? &the_pinned : at::getHostAllocator(backing.type));
}

} // namespace infini::device
