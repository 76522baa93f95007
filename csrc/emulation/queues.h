// Queues of work that has not run yet: what the streams of the emulated CUDA runtime have with INFINI_EMULATED_STREAMS=late.
// All functions may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace infini::emulation {

bool runs_late(); // whether the environment asks for it

struct Queue;

// A point in a queue: when the first `count` pieces of work are done.
struct Point {
    std::shared_ptr<Queue> queue; // nullptr: reached
    uint64_t count = 0;
};

std::shared_ptr<Queue> make_queue(int device);

// Adds work, which runs after `awaited` is reached; returns the point behind it.
Point push(const std::shared_ptr<Queue> &queue, std::function<void()> work, Point awaited = {});
Point end_of(const std::shared_ptr<Queue> &queue);

bool is_past(const Point &point);

// Runs what has to be done until the point is reached, at most `most` pieces of it.
void run_until(const Point &point, uint64_t most = UINT64_MAX);

// Runs all that the queues of a device have.
void run_queues_of(int device);

} // namespace infini::emulation
