// Streams, events and captures of the CPU; see stream.h.
#include "stream.h"

#include <atomic>
#include <system_error>
#include <utility>

namespace infini::runtime {

namespace {

thread_local bool is_worker = false;

[[noreturn]] void bad_param(const char *sentence) {
    throw Error(INFINI_STATUS_BAD_PARAM, sentence);
}

} // namespace

bool on_worker() {
    return is_worker;
}

std::optional<Failure> attempt(const Task &task) noexcept {
    static std::atomic<uint64_t> failures{0};
    try {
        task();
        return std::nullopt;
    } catch (const Error &error) {
        return Failure{error.status, error.what(), ++failures};
    } catch (const std::exception &error) {
        return Failure{INFINI_STATUS_INTERNAL_ERROR, error.what(), ++failures};
    } catch (...) {
        return Failure{INFINI_STATUS_INTERNAL_ERROR, "infini: an unknown exception", ++failures};
    }
}

void run_all(const Tasks &tasks) {
    std::optional<Failure> first;
    for (const Task &task : tasks) {
        std::optional<Failure> failure = attempt(task);
        if (!first) {
            first = std::move(failure);
        }
    }
    if (first) {
        throw Error(first->status, first->sentence);
    }
}

// ---- captures ----

bool Capture::is_open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_;
}

bool Capture::add(const Task &task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_) {
        tasks_.push_back(task);
    }
    return open_;
}

Tasks Capture::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
    return std::move(tasks_);
}

// ---- events ----

void Record::complete() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        complete_ = true;
        time_ = std::chrono::steady_clock::now();
    }
    completed_.notify_all();
}

bool Record::is_complete() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return complete_;
}

void Record::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    completed_.wait(lock, [&] { return complete_; });
}

Record::Time Record::time() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return time_;
}

std::shared_ptr<Record> CpuEvent::last() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_;
}

void CpuEvent::set_last(std::shared_ptr<Record> record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = std::move(record);
}

// ---- streams ----

CpuStream::CpuStream(bool queued) : immediate_(!queued) {
    if (immediate_) {
        return;
    }
    try {
        thread_ = std::thread([this] { work(); });
    } catch (const std::system_error &) {
        throw Error(INFINI_STATUS_INTERNAL_ERROR, "infinirtStreamCreate: the system gives no more threads");
    }
}

CpuStream::~CpuStream() {
    close();
}

void CpuStream::work() {
    is_worker = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        queued_or_closed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        Task task = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        std::optional<Failure> failure = attempt(task);
        task = nullptr; // may call a release(), so outside the lock
        lock.lock();
        if (!failure_) {
            failure_ = std::move(failure);
        }
        ++done_;
        done_or_closed_.notify_all();
    }
}

Capture *CpuStream::capture() {
    if (capture_ != nullptr && !capture_->is_open()) {
        capture_ = nullptr;
    }
    return capture_.get();
}

void CpuStream::wait_for_room(std::unique_lock<std::mutex> &lock) {
    if (!is_worker) {
        done_or_closed_.wait(lock, [&] { return closed_ || capture() != nullptr || queued_ - done_ < kMaxQueued; });
    }
}

void CpuStream::submit(std::unique_lock<std::mutex> &lock, const Task &task) {
    if (closed_) {
        bad_param("infinirt: the stream was destroyed by another thread while this call used it");
    }
    if (immediate_) {
        lock.unlock();
        return task();
    }
    queue_.push_back(task);
    ++queued_;
    lock.unlock();
    queued_or_closed_.notify_one();
}

void CpuStream::enqueue(const Task &task) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_room(lock);
    if (Capture *const open = capture(); open == nullptr || !open->add(task)) {
        submit(lock, task);
    }
}

bool CpuStream::enqueue_once(const Task &task) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_room(lock);
    if (capture() != nullptr) {
        return false;
    }
    submit(lock, task);
    return true;
}

void CpuStream::record(CpuEvent &event) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_room(lock);
    const bool captured = capture() != nullptr;
    const auto record = std::make_shared<Record>(captured ? capture_ : nullptr);
    if (!captured) {
        submit(lock, [record] { record->complete(); });
    }
    event.set_last(record);
}

void CpuStream::wait_for(CpuEvent &event) {
    const std::shared_ptr<Record> record = event.last();
    if (record == nullptr) {
        return; // never recorded: nothing to wait for
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_room(lock);
    Capture *const mine = capture();
    if (record->capture == nullptr) {
        if (mine != nullptr) {
            bad_param("infinirtStreamWaitEvent: event must be recorded in the capture that the stream is in, got one "
                      "that was recorded outside");
        }
        if (immediate_ && is_worker) { // a worker might wait for itself
            bad_param(
                "infinirtStreamWaitEvent: must not be called in a host function with an immediate stream, for which "
                "the call waits");
        }
        submit(lock, [record] { record->wait(); });
    } else if (mine != nullptr && mine != record->capture.get()) {
        bad_param("infinirtStreamWaitEvent: event must be recorded in the capture that the stream is in, got one of "
                  "another capture");
    } else if (!record->capture->is_open()) {
        bad_param("infinirtStreamWaitEvent: event must have been recorded since the capture in which it was last "
                  "recorded ended");
    } else {
        capture_ = record->capture; // joins the capture; the awaited record precedes it in the list
    }
}

void CpuStream::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t before = queued_;
    done_or_closed_.wait(lock, [&] { return done_ >= before; });
}

std::optional<Failure> CpuStream::take_failure() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(failure_, std::nullopt);
}

void CpuStream::begin_capture() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (capture() != nullptr) {
        bad_param("infinirtStreamBeginCapture: stream must not be captured already");
    }
    capture_ = std::make_shared<Capture>(this);
}

Tasks CpuStream::end_capture() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Capture *const open = capture(); open == nullptr || open->origin != this) {
        bad_param("infinirtStreamEndCapture: stream must be the one on which a capture began");
    }
    Tasks tasks = capture_->close();
    capture_ = nullptr;
    return tasks;
}

bool CpuStream::is_captured() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return capture() != nullptr;
}

void CpuStream::close() {
    Tasks lost; // destroyed last, when no lock is held
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        if (Capture *const open = capture(); open != nullptr && open->origin == this) {
            lost = open->close();
        }
        capture_ = nullptr;
    }
    queued_or_closed_.notify_all();
    done_or_closed_.notify_all(); // wakes callers that wait for room
    const std::lock_guard<std::mutex> lock(join_mutex_);
    if (thread_.joinable()) {
        thread_.join();
    }
}

} // namespace infini::runtime
