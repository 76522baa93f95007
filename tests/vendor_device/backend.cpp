// A made-up vendor's runtime backend, of two devices with the host's memory and streams that do everything at once.
// A real one calls its driver in each function. Built outside of the tree's own build: tests/test_vendor_device.py.
#include "backend.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace infini::runtime {
namespace {

struct QyStream : Stream {};

// The pieces of the device's memory there are, for the test.
std::mutex mutex;
std::map<const char *, size_t> live;

class QyBackend : public Backend {
public:
    int device_count() override { return 2; }
    void set_device(int) override {}
#ifndef QY_MEMORY_IS_FAR
    bool is_host_accessible(int) override { return true; }
#endif
    void device_synchronize(int) override {}

    std::shared_ptr<Stream> stream_create(int) override { return std::make_shared<QyStream>(); }
    void stream_destroy(Stream &) override {}
    void stream_synchronize(Stream &) override {}

    void *malloc(int, size_t size) override {
        void *const ptr = std::malloc(size);
        const std::lock_guard<std::mutex> lock(mutex);
        live[static_cast<char *>(ptr)] = size;
        return ptr;
    }
    void *malloc_host(int, size_t size) override { return std::malloc(size); }
    void free(int, void *ptr) override {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            live.erase(static_cast<char *>(ptr));
        }
        std::free(ptr);
    }
    void free_host(int, void *ptr) override { std::free(ptr); }
    void memcpy(int, void *dst, const void *src, size_t size, infinirtMemcpyKind_t) override {
        std::memcpy(dst, src, size);
    }
    void memcpy_async(void *dst, const void *src, size_t size, infinirtMemcpyKind_t, Stream &) override {
        std::memcpy(dst, src, size);
    }

    // What ops' kernels go out by: `native` is the stream that the caller named, NULL: done on return.
    void stream_enqueue(int, void *native, const std::function<void(void *)> &body) override { body(native); }
};

const Registered<QyBackend> registered{INFINI_DEVICE_QY};

} // namespace
} // namespace infini::runtime

extern "C" INFINI_API size_t qy_live() {
    const std::lock_guard<std::mutex> lock(infini::runtime::mutex);
    return infini::runtime::live.size();
}

// Whether an address lies in the device's memory.
extern "C" INFINI_API bool qy_owns(const void *address) {
    const std::lock_guard<std::mutex> lock(infini::runtime::mutex);
    const auto *const at = static_cast<const char *>(address);
    const auto above = infini::runtime::live.upper_bound(at);
    return above != infini::runtime::live.begin() && at < std::prev(above)->first + std::prev(above)->second;
}
