// Objects that need the GIL for their release and were dropped without it: kept until the main thread's interpreter, or
// the next call of this module, releases them. The dropping thread does not wait for the GIL, whose holder may be
// waiting for that thread.
#include <atomic>
#include <mutex>
#include <vector>

#include "owned.h"

namespace infinicore::python {

namespace {

class Dropped {
public:
    void add(std::function<void()> release) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) {
            return;
        }
        waiting_.push_back(std::move(release));
        is_empty_.store(false, std::memory_order_release);
        // If Python's own queue is full, the next call of this module releases the objects.
        is_asked_ = is_asked_ || Py_AddPendingCall(&Dropped::asked, this) == 0;
    }

    void release() {
        if (is_empty_.load(std::memory_order_acquire)) {
            return;
        }
        std::vector<std::function<void()>> taken;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            taken.swap(waiting_);
            is_empty_.store(true, std::memory_order_release);
        }
        for (const std::function<void()> &release : taken) {
            release();
        }
    }

    // Objects dropped from now on are released by the process's exit.
    void close() {
        release();
        const std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
    }

private:
    static int asked(void *self) {
        auto &dropped = *static_cast<Dropped *>(self);
        {
            const std::lock_guard<std::mutex> lock(dropped.mutex_);
            dropped.is_asked_ = false;
        }
        dropped.release();
        return 0;
    }

    std::mutex mutex_;
    std::vector<std::function<void()>> waiting_;
    std::atomic<bool> is_empty_{true};
    bool is_asked_ = false, is_closed_ = false;
};

Dropped &dropped() {
    static auto *const all = new Dropped; // threads may outlive static objects
    return *all;
}

} // namespace

void release_with_gil(std::function<void()> release) {
    if (Py_IsInitialized() && PyGILState_Check()) { // includes the thread that finalizes Python
        release();
    } else {
        dropped().add(std::move(release));
    }
}

void release_dropped() {
    dropped().release();
}

void bind_dropped() {
    py::module_::import("atexit").attr("register")(py::cpp_function([] { dropped().close(); }));
}

} // namespace infinicore::python
