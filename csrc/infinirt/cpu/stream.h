// Streams of the CPU. An immediate stream runs a task in the call that submits it; a queued stream has a queue and a
// thread that runs its tasks in order. An event is a record that one thread completes and others wait for. A capture
// appends tasks to a list instead of running them; a graph is such a list. All streams of a capture append in program
// order, which keeps every dependency.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../backend.h"

#if defined(__GLIBCXX__) && defined(__x86_64__)
// GCC 12 gave wait() a new version, which was all that kept a wheel from Linux with the libstdc++ of GCC 11
// (manylinux_2_34). Both libraries have the earlier version.
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif

namespace infini::runtime {

// A unit of work; throws on failure. Queues and graphs hold copies, with shared state by shared_ptr.
using Task = std::function<void()>;
using Tasks = std::vector<Task>;

// A task's exception, and its number among all failures of the process.
struct Failure {
    infiniStatus_t status;
    std::string sentence;
    uint64_t order;
};

std::optional<Failure> attempt(const Task &task) noexcept;

// Runs all tasks, also those after a failure, as a queue does; then throws the first failure.
void run_all(const Tasks &tasks);

// The most unfinished tasks of a queued stream. A call that would exceed it waits, except on a worker thread, which
// might wait for itself.
constexpr uint64_t kMaxQueued = 1024;

// Whether the calling thread is the worker of a stream.
bool on_worker();

class CpuStream;

struct CpuGraph : Graph {
    std::shared_ptr<const Tasks> tasks;
};
struct CpuGraphExec : GraphExec {
    std::shared_ptr<const Tasks> tasks;
};

// A capture, open from its begin to its end on the origin stream; then it is closed for all streams that joined.
class Capture {
public:
    explicit Capture(const CpuStream *origin) : origin(origin) {}
    const CpuStream *const origin; // compared, never dereferenced

    bool is_open();
    bool add(const Task &task); // false if the capture is closed
    Tasks close();

private:
    std::mutex mutex_;
    bool open_ = true;
    Tasks tasks_;
};

// One infinirtEventRecord(). The stream's worker completes it in stream order, or the call itself if there is no
// worker. In a capture it only marks a position.
class Record {
public:
    using Time = std::chrono::steady_clock::time_point;

    explicit Record(std::shared_ptr<Capture> captured_in = nullptr) : capture(std::move(captured_in)) {}
    const std::shared_ptr<Capture> capture;

    void complete();
    bool is_complete();
    void wait();
    Time time(); // when it completed

private:
    std::mutex mutex_;
    std::condition_variable completed_;
    bool complete_ = false;
    Time time_;
};

class CpuEvent : public Event {
public:
    std::shared_ptr<Record> last(); // nullptr if never recorded
    void set_last(std::shared_ptr<Record> record);

private:
    std::mutex mutex_;
    std::shared_ptr<Record> last_;
};

class CpuStream : public Stream {
public:
    explicit CpuStream(bool queued);
    ~CpuStream() override;

    // Queues or captures the task. An immediate stream runs it, and its exception propagates.
    void enqueue(const Task &task);
    // The same for a task that cannot be replayed; returns false if the stream is captured.
    bool enqueue_once(const Task &task);

    void record(CpuEvent &event);
    void wait_for(CpuEvent &event);

    // Returns when all work queued before the call is done.
    void drain();
    // Returns and clears the first failure since the last call.
    std::optional<Failure> take_failure();

    void begin_capture();
    Tasks end_capture();
    bool is_captured();

    // Runs all queued tasks, then ends the thread. Later tasks fail.
    void close();

private:
    void work();
    void wait_for_room(std::unique_lock<std::mutex> &lock);
    void submit(std::unique_lock<std::mutex> &lock, const Task &task); // unlocks `lock`
    Capture *capture(); // the stream's open capture, or nullptr; call under the mutex

    const bool immediate_;
    std::mutex mutex_;
    std::condition_variable queued_or_closed_, done_or_closed_;
    std::deque<Task> queue_;
    uint64_t queued_ = 0, done_ = 0;
    std::optional<Failure> failure_;
    std::shared_ptr<Capture> capture_;
    bool closed_ = false;
    std::mutex join_mutex_;
    std::thread thread_;
};

} // namespace infini::runtime
