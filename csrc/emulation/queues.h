// Queues of work that has not run yet, which the emulated CUDA runtime's streams use with INFINI_EMULATED_STREAMS=late.
// All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace infini::emulation {

bool runs_late(); // whether the environment variable is set to "late"

struct Queue;

// A point in a queue, reached when the first `count` pieces of work are done.
struct Point {
    std::shared_ptr<Queue> queue; // nullptr: already reached
    uint64_t count = 0;
};

std::shared_ptr<Queue> make_queue(int device);

// Adds work that runs after `awaited` is reached; returns the point after it.
Point push(const std::shared_ptr<Queue> &queue, std::function<void()> work, Point awaited = {});
Point end_of(const std::shared_ptr<Queue> &queue);

bool is_past(const Point &point);

// Runs what must be done to reach the point, at most `most` pieces of work.
void run_until(const Point &point, uint64_t most = UINT64_MAX);

// Runs all work in the queues of a device.
void run_queues_of(int device);

} // namespace infini::emulation
