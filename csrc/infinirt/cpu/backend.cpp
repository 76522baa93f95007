// The CPU as a device: one device, with the host's memory. Streams, events and captures are in stream.h.
#include "../backend.h"

#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "stream.h"

namespace infini::runtime {

namespace {

constexpr size_t kAlignment = 64; // a cache line, and the widest vector

// Sets omp_set_num_threads() for a scope, for the calling thread.
struct OpenMPThreads {
    explicit OpenMPThreads(int threads) { omp_set_num_threads(threads); }
    ~OpenMPThreads() { omp_set_num_threads(before); }
    const int before = omp_get_max_threads();
};

// A host function, shared by queues and graphs: the last reference to go calls release().
class HostFunction {
public:
    HostFunction(infinirtHostFunction_t function, void *data, void (*release)(void *))
        : function_(function), data_(data), release_(release) {}
    HostFunction(const HostFunction &) = delete;
    ~HostFunction() {
        if (release_ != nullptr) {
            release_(data_);
        }
    }

    // The call failed: data still belongs to the caller.
    void give_back() { release_ = nullptr; }

    void run() const {
        const OpenMPThreads as_the_caller(threads_);
        const std::string last_error = infiniGetLastErrorMessage();
        infinirtSetLastErrorMessage(nullptr);
        const infiniStatus_t status = function_(data_);
        const std::string sentence = infiniGetLastErrorMessage();
        infinirtSetLastErrorMessage(last_error.c_str());
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status,
                        sentence.empty() ? message("infinirt: a host function returned status ", status) : sentence);
        }
    }

private:
    const infinirtHostFunction_t function_;
    void *const data_;
    void (*release_)(void *);
    const int threads_ = omp_get_max_threads();
};

CpuStream &cpu(Stream &stream) {
    return static_cast<CpuStream &>(stream);
}

CpuEvent &cpu(Event &event) {
    return static_cast<CpuEvent &>(event);
}

// Throws on a worker thread, which might wait for itself.
void not_on_worker(const char *function) {
    if (on_worker()) {
        throw Error(INFINI_STATUS_BAD_PARAM, message(function, ": must not be called in a host function, as it waits"));
    }
}

// The setting INFINI_CPU_STREAMS, read once.
bool queued_by_default() {
    static const bool queued = [] {
        const char *const value = std::getenv("INFINI_CPU_STREAMS");
        const std::string mode = value == nullptr || *value == '\0' ? "immediate" : value;
        if (mode != "immediate" && mode != "queued") {
            throw Error(INFINI_STATUS_BAD_PARAM,
                        message("infinirtStreamCreate: the environment variable INFINI_CPU_STREAMS must be queued or ",
                                "immediate, got ", mode));
        }
        return mode == "queued";
    }();
    return queued;
}

[[noreturn]] void refuse_captured(const char *function, infiniStatus_t status) {
    throw Error(status, message(function, ": stream must not be captured at the time"));
}

// The event's last record, or nullptr. A record in a capture never completes.
std::shared_ptr<Record> last_record(const char *function, const char *argument, Event &event) {
    std::shared_ptr<Record> record = cpu(event).last();
    if (record != nullptr && record->capture != nullptr) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message(function, ": ", argument, " must not be last recorded in a capture, which only orders it"));
    }
    return record;
}

Record::Time completion(const char *argument, Event &event) {
    constexpr const char *function = "infinirtEventElapsedTime";
    const std::shared_ptr<Record> record = last_record(function, argument, event);
    if (record == nullptr || !record->is_complete()) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message(function, ": ", argument, " must be an event that is complete, ",
                            record == nullptr ? "got one that was never recorded" : "got one that is not ready"));
    }
    return record->time();
}

class CpuBackend : public Backend {
public:
    int device_count() override { return 1; }
    void set_device(int) override {}
    bool is_host_accessible(int) override { return true; }

    void device_synchronize(int) override {
        not_on_worker("infinirtDeviceSynchronize");
        std::optional<Failure> first;
        for (const auto &[handle, stream] : all_streams()) {
            stream->drain();
            std::optional<Failure> failure = stream->take_failure();
            if (failure && (!first || failure->order < first->order)) {
                first = std::move(failure);
            }
        }
        if (first) {
            throw Error(first->status, first->sentence);
        }
    }

    // ---- streams ----

    std::shared_ptr<Stream> stream_create(int) override { return stream_made(queued_by_default()); }

    std::shared_ptr<Stream> stream_create_queued(int) override {
        queued_by_default(); // throws if the setting is invalid
        return stream_made(true);
    }

    void stream_destroy(Stream &stream) override {
        not_on_worker("infinirtStreamDestroy");
        cpu(stream).close();
        const std::lock_guard<std::mutex> lock(mutex_);
        streams_.erase(&stream);
    }

    void stream_synchronize(Stream &stream) override {
        not_on_worker("infinirtStreamSynchronize");
        if (cpu(stream).is_captured()) {
            refuse_captured("infinirtStreamSynchronize", INFINI_STATUS_BAD_PARAM);
        }
        cpu(stream).drain();
        if (const std::optional<Failure> failure = cpu(stream).take_failure()) {
            throw Error(failure->status, failure->sentence);
        }
    }

    void stream_launch_host_function(Stream *stream, infinirtHostFunction_t function, void *data,
                                     void (*release)(void *)) override {
        const auto call = std::make_shared<HostFunction>(function, data, release);
        try {
            if (stream == nullptr) {
                call->run();
            } else {
                cpu(*stream).enqueue([call] { call->run(); });
            }
        } catch (...) {
            call->give_back();
            throw;
        }
    }

    // ---- events ----

    std::shared_ptr<Event> event_create(int, uint32_t) override { return std::make_shared<CpuEvent>(); }

    void event_record(Event &event, Stream *stream) override {
        if (stream != nullptr) {
            cpu(*stream).record(cpu(event));
        } else {
            const auto record = std::make_shared<Record>();
            record->complete();
            cpu(event).set_last(record);
        }
    }

    infinirtEventStatus_t event_query(Event &event) override {
        const std::shared_ptr<Record> record = last_record("infinirtEventQuery", "event", event);
        return record == nullptr || record->is_complete() ? INFINIRT_EVENT_COMPLETE : INFINIRT_EVENT_NOT_READY;
    }

    void event_synchronize(Event &event) override {
        not_on_worker("infinirtEventSynchronize");
        if (const std::shared_ptr<Record> record = last_record("infinirtEventSynchronize", "event", event)) {
            record->wait();
        }
    }

    float event_elapsed_time(Event &start, Event &end) override {
        const Record::Time from = completion("start", start), to = completion("end", end);
        return std::chrono::duration<float, std::milli>(to - from).count();
    }

    void stream_wait_event(Stream &stream, Event &event) override { cpu(stream).wait_for(cpu(event)); }

    // ---- memory ----

    void *malloc(int, size_t size) override {
        return size > PTRDIFF_MAX ? nullptr
                                  : std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    }

    void *malloc_host(int device_id, size_t size) override { return malloc(device_id, size); }

    void free(int, void *ptr) override {
        if (!on_worker()) {
            for (const auto &[handle, stream] : all_streams()) {
                stream->drain();
            }
        }
        std::free(ptr);
    }

    void free_host(int device_id, void *ptr) override { free(device_id, ptr); }

    void *malloc_async(size_t size, Stream &stream) override {
        if (cpu(stream).is_captured()) {
            refuse_captured("infinirtMallocAsync", INFINI_STATUS_NOT_IMPLEMENTED);
        }
        return malloc(0, size);
    }

    void free_async(void *ptr, Stream &stream) override {
        if (!cpu(stream).enqueue_once([ptr] { std::free(ptr); })) {
            refuse_captured("infinirtFreeAsync", INFINI_STATUS_NOT_IMPLEMENTED);
        }
    }

    void memcpy(int, void *dst, const void *src, size_t size, infinirtMemcpyKind_t) override {
        std::memmove(dst, src, size);
    }

    void memcpy_async(void *dst, const void *src, size_t size, infinirtMemcpyKind_t, Stream &stream) override {
        cpu(stream).enqueue([dst, src, size] { std::memmove(dst, src, size); });
    }

    // ---- graphs ----

    void stream_begin_capture(Stream &stream, infinirtStreamCaptureMode_t) override { cpu(stream).begin_capture(); }

    std::shared_ptr<Graph> stream_end_capture(Stream &stream) override {
        auto graph = std::make_shared<CpuGraph>();
        graph->tasks = std::make_shared<const Tasks>(cpu(stream).end_capture());
        return graph;
    }

    std::shared_ptr<GraphExec> graph_instantiate(Graph &graph, infinirtGraphNode_t *) override {
        auto exec = std::make_shared<CpuGraphExec>();
        exec->tasks = static_cast<CpuGraph &>(graph).tasks;
        return exec;
    }

    void graph_launch(GraphExec &exec, Stream *stream) override {
        const std::shared_ptr<const Tasks> tasks = static_cast<CpuGraphExec &>(exec).tasks;
        if (stream == nullptr) {
            run_all(*tasks);
        } else {
            cpu(*stream).enqueue([tasks] { run_all(*tasks); });
        }
    }

private:
    std::shared_ptr<Stream> stream_made(bool queued) {
        auto stream = std::make_shared<CpuStream>(queued);
        const std::lock_guard<std::mutex> lock(mutex_);
        streams_.emplace(stream.get(), stream);
        return stream;
    }

    std::map<Stream *, std::shared_ptr<CpuStream>> all_streams() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return streams_;
    }

    std::mutex mutex_;
    std::map<Stream *, std::shared_ptr<CpuStream>> streams_;
};

const Registered<CpuBackend> registered{INFINI_DEVICE_CPU};

} // namespace

} // namespace infini::runtime
