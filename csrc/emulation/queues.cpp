// Queues: work is held until something waits for it or for later work.
#include "queues.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

namespace infini::emulation {

struct Queue {
    struct Item {
        std::function<void()> work;
        Point awaited;
    };
    int device;
    std::deque<Item> items{};
    uint64_t queued = 0, done = 0;
};

namespace {

using Lock = std::lock_guard<std::mutex>;

std::mutex mutex; // guards all queues
std::vector<std::weak_ptr<Queue>> queues;

bool is_reached(const Point &point) {
    return point.queue == nullptr || point.queue->done >= point.count;
}

} // namespace

bool runs_late() {
    static const bool late = [] {
        const char *const when = std::getenv("INFINI_EMULATED_STREAMS");
        return when != nullptr && std::strcmp(when, "late") == 0;
    }();
    return late;
}

std::shared_ptr<Queue> make_queue(int device) {
    auto queue = std::make_shared<Queue>(Queue{device});
    const Lock lock(mutex);
    queues.erase(std::remove_if(queues.begin(), queues.end(), [](const auto &other) { return other.expired(); }),
                 queues.end());
    queues.push_back(queue);
    return queue;
}

Point push(const std::shared_ptr<Queue> &queue, std::function<void()> work, Point awaited) {
    const Lock lock(mutex);
    queue->items.push_back({std::move(work), std::move(awaited)});
    return {queue, ++queue->queued};
}

Point end_of(const std::shared_ptr<Queue> &queue) {
    const Lock lock(mutex);
    return {queue, queue->queued};
}

bool is_past(const Point &point) {
    const Lock lock(mutex);
    return is_reached(point);
}

void run_until(const Point &point, uint64_t most) {
    static std::recursive_mutex running; // one thread at a time runs work
    if (point.queue == nullptr) {
        return;
    }
    const std::lock_guard<std::recursive_mutex> one(running);
    for (uint64_t i = 0; i < most; ++i) {
        Queue::Item item;
        {
            const Lock lock(mutex);
            if (is_reached(point)) {
                return;
            }
            item = std::move(point.queue->items.front());
            point.queue->items.pop_front();
        }
        const std::shared_ptr<void> done(nullptr, [&](void *) { // also after work that throws
            const Lock lock(mutex);
            ++point.queue->done;
        });
        run_until(item.awaited);
        if (item.work) {
            item.work();
        }
    }
}

void run_queues_of(int device) {
    std::vector<Point> ends;
    {
        const Lock lock(mutex);
        for (const std::weak_ptr<Queue> &weak : queues) {
            if (const auto queue = weak.lock(); queue != nullptr && queue->device == device) {
                ends.push_back({queue, queue->queued});
            }
        }
    }
    for (const Point &end : ends) {
        run_until(end);
    }
}

} // namespace infini::emulation
