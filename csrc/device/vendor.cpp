// Memory of a vendor's device that the host can access; if such a device backs infini, twins lie in it. torch's CPU
// kernels allocate their results by torch's CPU allocator, which is replaced here: during calls on infini tensors it
// returns the vendor's memory, otherwise the CPU's.
#include "device.h"

#include <mutex>
#include <unordered_set>
#include <utility>

#include <c10/core/CPUAllocator.h>

namespace infini::device {
namespace {

thread_local bool in_vendor_memory = false;

// Makes the vendor's device the calling thread's current infinirt device for a scope.
class OnVendor {
public:
    OnVendor() {
        infinirtGetDevice(&type_, &id_);
        const infiniStatus_t status = infinirtSetDevice(backing.vendor, 0);
        TORCH_CHECK(status == INFINI_STATUS_SUCCESS, infiniGetLastErrorMessage());
    }
    ~OnVendor() { infinirtSetDevice(type_, id_); }
    OnVendor(const OnVendor &) = delete;
    OnVendor &operator=(const OnVendor &) = delete;

private:
    infiniDevice_t type_ = INFINI_DEVICE_CPU;
    int id_ = 0;
};

class Allocator final : public c10::Allocator {
public:
    explicit Allocator(c10::Allocator *cpu) : cpu_(cpu) {}

    c10::DataPtr allocate(size_t bytes) override {
        if (!in_vendor_memory) {
            return cpu_->allocate(bytes);
        }
        void *pointer = nullptr;
        if (bytes != 0) {
            const OnVendor current;
            TORCH_CHECK_WITH(OutOfMemoryError, infinirtMalloc(&pointer, bytes) == INFINI_STATUS_SUCCESS,
                             "infini out of memory. Tried to allocate ", bytes, " bytes. ",
                             infiniGetLastErrorMessage());
            const std::lock_guard<std::mutex> lock(mutex_);
            vendors_.insert(pointer);
        }
        return {pointer, pointer, &free_vendors, c10::Device(c10::kCPU)};
    }

    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    c10::DeleterFnPtr raw_deleter() const override { return &free_either; }

    static void free_vendors(void *pointer);
    static void free_either(void *pointer);

private:
    c10::Allocator *const cpu_;
    std::mutex mutex_;
    std::unordered_set<void *> vendors_;
};

Allocator *the_vendor_allocator = nullptr; // never destroyed: tensors may outlive the end of main()

void Allocator::free_vendors(void *pointer) {
    if (pointer != nullptr) {
        {
            const std::lock_guard<std::mutex> lock(the_vendor_allocator->mutex_);
            the_vendor_allocator->vendors_.erase(pointer);
        }
        const OnVendor current;
        infinirtFree(pointer);
    }
}

// Frees memory that was allocated "raw", without a DataPtr that knows its allocator.
void Allocator::free_either(void *pointer) {
    bool is_vendors = false;
    {
        const std::lock_guard<std::mutex> lock(the_vendor_allocator->mutex_);
        is_vendors = the_vendor_allocator->vendors_.count(pointer) != 0;
    }
    if (is_vendors) {
        free_vendors(pointer);
    } else {
        the_vendor_allocator->cpu_->raw_deleter()(pointer);
    }
}

} // namespace

InVendorMemory::InVendorMemory() : before_(std::exchange(in_vendor_memory, backing.is_vendors())) {}

InVendorMemory::~InVendorMemory() {
    in_vendor_memory = before_;
}

void register_vendor_memory() {
    the_vendor_allocator = new Allocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(the_vendor_allocator, 255);
}

bool is_vendor_memory(const c10::StorageImpl *storage) {
    return storage->nbytes() == 0 || storage->data_ptr().get_deleter() == &Allocator::free_vendors;
}

} // namespace infini::device
