// The functions of infinirt.h except the error functions and the CPU's instruction sets. Each checks its arguments,
// turns handles into objects, and calls the backend of the object's device, or of the thread's current device.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "allocations.h"
#include "backend.h"
#include "guard.h"
#include "handle_table.h"

namespace infini::runtime {

namespace {

thread_local Device current;

// Never destroyed: threads may still run while the process exits.
HandleTable<Stream> &streams = *new HandleTable<Stream>;
HandleTable<Event> &events = *new HandleTable<Event>;
HandleTable<Graph> &graphs = *new HandleTable<Graph>;
HandleTable<GraphExec> &graph_execs = *new HandleTable<GraphExec>;
Allocations &allocations = *new Allocations;
std::mutex foreign_streams; // held while a foreign stream is registered or forgotten

// An enum's value as a number. C callers may pass a value out of range.
template <typename Enum> unsigned number_of(const Enum &value) {
    unsigned number;
    static_assert(sizeof number == sizeof value);
    std::memcpy(&number, &value, sizeof number);
    return number;
}

std::string backend_names() {
    std::string names;
    for (int type = 0; type < INFINI_DEVICE_TYPE_COUNT; ++type) {
        if (backend_of(static_cast<infiniDevice_t>(type)) != nullptr) {
            names += message(names.empty() ? "" : ", ", name_of(static_cast<infiniDevice_t>(type)));
        }
    }
    return names;
}

Backend &current_backend() {
    return *backend_of(current.type);
}

// The checks of one call; holds the function's name for messages.
class Call {
public:
    explicit Call(const char *function) : function_(function) {}

    template <typename... Parts> [[noreturn]] void refuse(infiniStatus_t status, const Parts &...parts) const {
        throw Error(status, message(function_, ": ", parts...));
    }

    void not_null(const char *argument, const void *pointer) const { infini::not_null(function_, argument, pointer); }

    // The backend of the device; throws if there is no such device.
    Backend &device(const infiniDevice_t &type, int id) const {
        device_type(type);
        Backend *const backend = backend_of(type);
        if (backend == nullptr) {
            refuse(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED, "device must be one this build has a backend for (",
                   backend_names(), "), got ", name_of(type),
                   type == INFINI_DEVICE_NVIDIA ? "; a build with nvcc has one"
                                                : "; CONTRIBUTING.md, \"Bring up a device\", adds one");
        }
        const int count = backend->device_count();
        if (id < 0 || id >= count) {
            refuse(INFINI_STATUS_DEVICE_NOT_FOUND, "device_id must be less than the number of devices (", name_of(type),
                   " has ", count, "), got ", id);
        }
        return *backend;
    }

    void device_type(const infiniDevice_t &device) const {
        if (number_of(device) >= INFINI_DEVICE_TYPE_COUNT) {
            refuse(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED, "device must be a device type, 0 to ",
                   INFINI_DEVICE_TYPE_COUNT - 1, ", got ", static_cast<int>(number_of(device)));
        }
    }

    // The object behind a handle; throws for NULL.
    std::shared_ptr<Stream> stream(void *handle) const { return object(streams, "stream", handle); }
    std::shared_ptr<Event> event(const char *argument, void *handle) const { return object(events, argument, handle); }
    std::shared_ptr<Graph> graph(void *handle) const { return object(graphs, "graph", handle); }
    std::shared_ptr<GraphExec> graph_exec(void *handle) const { return object(graph_execs, "graph_exec", handle); }

    // Returns nullptr for a NULL stream.
    std::shared_ptr<Stream> stream_or_null(void *handle) const { return handle == nullptr ? nullptr : stream(handle); }

    // Removes the object from its table, so that the handle is no longer valid.
    template <typename T> std::shared_ptr<T> take(HandleTable<T> &live, const char *argument, void *handle) const {
        not_null(argument, handle);
        return found(live.erase(handle), argument, handle);
    }

    void one_backend(const Object &a, const Object &b, const char *names) const {
        if (a.backend != b.backend) {
            refuse(INFINI_STATUS_BAD_PARAM, names, " must be of one device type, got ", name_of(a.backend->type),
                   " and ", name_of(b.backend->type));
        }
    }

    void one_device(const Object &a, const Object &b, const char *names) const {
        one_backend(a, b, names);
        if (a.device_id != b.device_id) {
            refuse(INFINI_STATUS_BAD_PARAM, names, " must be of one device, got ", name_of(a.backend->type), " ",
                   a.device_id, " and ", b.device_id);
        }
    }

    // Checks a copy. `device` is the device that copies.
    void copy(Device device, void *dst, const void *src, size_t size, const infinirtMemcpyKind_t &kind) const {
        const unsigned number = number_of(kind);
        if (number > INFINIRT_MEMCPY_D2D) {
            refuse(INFINI_STATUS_BAD_PARAM, "kind must be an infinirtMemcpyKind_t, 0 to ", INFINIRT_MEMCPY_D2D,
                   ", got ", static_cast<int>(number));
        }
        if (size == 0) {
            return;
        }
        const bool to_device = number == INFINIRT_MEMCPY_H2D || number == INFINIRT_MEMCPY_D2D;
        const bool from_device = number == INFINIRT_MEMCPY_D2H || number == INFINIRT_MEMCPY_D2D;
        range("dst", to_device ? device : Device{}, dst, size);
        range("src", from_device ? device : Device{}, src, size);
    }

    // Registers memory that a backend has allocated.
    void allocated(Device device, bool host, size_t size, void *ptr) const {
        if (ptr == nullptr) {
            refuse(INFINI_STATUS_INTERNAL_ERROR, "no memory for ", size, " bytes on ", name_of(device.type), " ",
                   device.id);
        }
        allocations.insert(ptr, {size, device, host});
    }

    // Unregisters and returns an allocation of the device, or of the host.
    Allocation take_memory(Device device, bool host, void *ptr) const {
        const Allocation allocation = allocations.erase(device, host, ptr);
        if (allocation.size == 0) {
            const std::string of =
                host ? "infinirtMallocHost" : message("infinirtMalloc on ", name_of(device.type), " ", device.id);
            refuse(INFINI_STATUS_BAD_PARAM, "ptr must be memory of ", of, " that was not freed, got ", ptr);
        }
        return allocation;
    }

private:
    template <typename T> std::shared_ptr<T> object(HandleTable<T> &live, const char *argument, void *handle) const {
        not_null(argument, handle);
        return found(live.find(handle), argument, handle);
    }

    template <typename T> std::shared_ptr<T> found(std::shared_ptr<T> value, const char *argument, void *handle) const {
        if (value == nullptr) {
            refuse(INFINI_STATUS_BAD_PARAM, argument, " must be a handle that was made and not destroyed, got ",
                   handle);
        }
        return value;
    }

    void range(const char *argument, Device space, const void *ptr, size_t size) const {
        not_null(argument, ptr);
        const size_t left = std::min<size_t>(allocations.bytes_left(space, ptr), PTRDIFF_MAX);
        if (size > left) {
            refuse(INFINI_STATUS_BAD_PARAM, "size must be at most the ", left, " bytes there are at ", argument,
                   ", got ", size);
        }
    }

    const char *function_;
};

template <typename Body> infiniStatus_t enter(const char *function, const Body &body) {
    return guarded(function, [&] { body(Call(function)); });
}

Device device_of(const Object &object) {
    return {object.backend->type, object.device_id};
}

void *keep(std::shared_ptr<Stream> stream) {
    void *const handle = stream->handle;
    return streams.insert(handle, std::move(stream));
}

// Registers an object that a backend has created and returns its handle.
template <typename T> void *hand_out(HandleTable<T> &live, std::shared_ptr<T> object, Device device) {
    object->backend = backend_of(device.type);
    object->device_id = device.id;
    if constexpr (std::is_same_v<T, Stream>) {
        return keep(std::move(object));
    } else {
        return live.insert(std::move(object));
    }
}

// Calls free(). If that throws, registers the memory again.
template <typename Free> void or_keep(void *ptr, const Allocation &allocation, const Free &free) {
    try {
        free();
    } catch (...) {
        allocations.insert(ptr, allocation);
        throw;
    }
}

infiniStatus_t stream_create(const char *function, infinirtStream_t *stream_ptr, uint32_t flags) {
    return enter(function, [&](const Call &call) {
        call.not_null("stream_ptr", stream_ptr);
        if ((flags & ~static_cast<uint32_t>(INFINIRT_STREAM_QUEUED)) != 0) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "flags must be an or of infinirtStreamFlags_t (0 to ",
                        INFINIRT_STREAM_QUEUED, "), got ", flags);
        }
        Backend &backend = current_backend();
        *stream_ptr = hand_out(streams,
                               (flags & INFINIRT_STREAM_QUEUED) != 0 ? backend.stream_create_queued(current.id)
                                                                     : backend.stream_create(current.id),
                               current);
    });
}

infiniStatus_t event_create(const char *function, infinirtEvent_t *event_ptr, uint32_t flags) {
    return enter(function, [&](const Call &call) {
        constexpr uint32_t known = INFINIRT_EVENT_DISABLE_TIMING | INFINIRT_EVENT_BLOCKING_SYNC;
        call.not_null("event_ptr", event_ptr);
        if ((flags & ~known) != 0) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "flags must be an or of infinirtEventFlags_t (0 to ", known, "), got ",
                        flags);
        }
        auto event = current_backend().event_create(current.id, flags);
        event->flags = flags;
        *event_ptr = hand_out(events, std::move(event), current);
    });
}

} // namespace

} // namespace infini::runtime

using namespace infini;
using namespace infini::runtime;

// ---- devices ----

infiniStatus_t infinirtInit(void) {
    int counts[INFINI_DEVICE_TYPE_COUNT];
    return infinirtGetAllDeviceCount(counts); // each backend initializes itself when it is asked for its device count
}

infiniStatus_t infinirtGetAllDeviceCount(int *count_array) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("count_array", count_array);
        int counts[INFINI_DEVICE_TYPE_COUNT] = {};
        for (int type = 0; type < INFINI_DEVICE_TYPE_COUNT; ++type) {
            Backend *const backend = backend_of(static_cast<infiniDevice_t>(type));
            counts[type] = backend == nullptr ? 0 : backend->device_count();
        }
        std::copy(std::begin(counts), std::end(counts), count_array);
    });
}

infiniStatus_t infinirtGetDeviceCount(infiniDevice_t device, int *count) {
    return enter(__func__, [&](const Call &call) {
        call.device_type(device);
        call.not_null("count", count);
        Backend *const backend = backend_of(device);
        *count = backend == nullptr ? 0 : backend->device_count();
    });
}

infiniStatus_t infinirtIsHostAccessible(infiniDevice_t device, int device_id, int *is_accessible) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("is_accessible", is_accessible);
        *is_accessible = call.device(device, device_id).is_host_accessible(device_id) ? 1 : 0;
    });
}

infiniStatus_t infinirtSetDevice(infiniDevice_t device, int device_id) {
    return enter(__func__, [&](const Call &call) {
        call.device(device, device_id).set_device(device_id);
        current = {device, device_id};
    });
}

infiniStatus_t infinirtGetDevice(infiniDevice_t *device_ptr, int *device_id_ptr) {
    if (device_ptr != nullptr) {
        *device_ptr = current.type;
    }
    if (device_id_ptr != nullptr) {
        *device_id_ptr = current.id;
    }
    return INFINI_STATUS_SUCCESS;
}

infiniStatus_t infinirtDeviceSynchronize(void) {
    return enter(__func__, [&](const Call &) { current_backend().device_synchronize(current.id); });
}

// ---- streams ----

infiniStatus_t infinirtStreamCreate(infinirtStream_t *stream_ptr) {
    return stream_create(__func__, stream_ptr, INFINIRT_STREAM_DEFAULT);
}

infiniStatus_t infinirtStreamCreateWithFlags(infinirtStream_t *stream_ptr, uint32_t flags) {
    return stream_create(__func__, stream_ptr, flags);
}

infiniStatus_t infinirtStreamFromNative(infinirtStream_t *stream_ptr, void *native) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("stream_ptr", stream_ptr);
        call.not_null("native", native);
        const std::lock_guard<std::mutex> lock(foreign_streams);
        std::shared_ptr<Stream> stream = streams.find(native);
        if (stream == nullptr) {
            stream = current_backend().stream_from_native(current.id, native);
            hand_out(streams, stream, current);
        } else if (stream->foreign_handles == 0) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "native must be a stream that the caller made, got one of "
                                                 "infinirtStreamCreate");
        } else if (stream->backend != &current_backend() || stream->device_id != current.id) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "native must be a stream of the current device, ",
                        name_of(current.type), " ", current.id, ", got one registered for ",
                        name_of(stream->backend->type), " ", stream->device_id);
        }
        ++stream->foreign_handles;
        *stream_ptr = stream->handle;
    });
}

infiniStatus_t infinirtStreamDestroy(infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        std::unique_lock<std::mutex> lock(foreign_streams);
        const auto taken = call.take(streams, "stream", stream);
        if (taken->foreign_handles > 0) {
            if (--taken->foreign_handles > 0) {
                keep(taken);
            }
            return;
        }
        lock.unlock();
        try {
            taken->backend->stream_destroy(*taken);
        } catch (...) {
            keep(taken); // it failed: the handle stays valid
            throw;
        }
    });
}

infiniStatus_t infinirtStreamSynchronize(infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        if (const auto found = call.stream_or_null(stream)) { // nothing is queued on a NULL stream
            found->backend->stream_synchronize(*found);
        }
    });
}

infiniStatus_t infinirtStreamWaitEvent(infinirtStream_t stream, infinirtEvent_t event) {
    return enter(__func__, [&](const Call &call) {
        const auto waiting = call.stream_or_null(stream);
        const auto found = call.event("event", event);
        if (waiting == nullptr) {
            found->backend->event_synchronize(*found);
        } else {
            call.one_backend(*waiting, *found, "stream and event");
            waiting->backend->stream_wait_event(*waiting, *found);
        }
    });
}

infiniStatus_t infinirtStreamLaunchHostFunction(infinirtStream_t stream, infinirtHostFunction_t function, void *data,
                                                void (*release)(void *data)) {
    return enter(__func__, [&](const Call &call) {
        const auto found = call.stream_or_null(stream);
        call.not_null("function", reinterpret_cast<const void *>(function));
        Backend &backend = found == nullptr ? current_backend() : *found->backend;
        backend.stream_launch_host_function(found.get(), function, data, release);
    });
}

infiniStatus_t infinirtStreamEnqueue(infiniDevice_t device, int device_id, infinirtStream_t stream,
                                     infinirtEnqueue_t enqueue, void *data) {
    return enter(__func__, [&](const Call &call) {
        Backend &backend = call.device(device, device_id);
        call.not_null("enqueue", reinterpret_cast<const void *>(enqueue));
        backend.stream_enqueue(device_id, stream, [&](void *native) {
            const infiniStatus_t status = enqueue(native, data);
            if (status != INFINI_STATUS_SUCCESS) {
                throw Error(status, infiniGetLastErrorMessage());
            }
        });
    });
}

// ---- events ----

infiniStatus_t infinirtEventCreate(infinirtEvent_t *event_ptr) {
    return event_create(__func__, event_ptr, INFINIRT_EVENT_DEFAULT);
}

infiniStatus_t infinirtEventCreateWithFlags(infinirtEvent_t *event_ptr, uint32_t flags) {
    return event_create(__func__, event_ptr, flags);
}

infiniStatus_t infinirtEventRecord(infinirtEvent_t event, infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        const auto found = call.event("event", event);
        const auto queue = call.stream_or_null(stream);
        if (queue != nullptr) {
            call.one_device(*found, *queue, "event and stream");
        }
        found->backend->event_record(*found, queue.get());
    });
}

infiniStatus_t infinirtEventQuery(infinirtEvent_t event, infinirtEventStatus_t *status_ptr) {
    return enter(__func__, [&](const Call &call) {
        const auto found = call.event("event", event);
        call.not_null("status_ptr", status_ptr);
        *status_ptr = found->backend->event_query(*found);
    });
}

infiniStatus_t infinirtEventSynchronize(infinirtEvent_t event) {
    return enter(__func__, [&](const Call &call) {
        const auto found = call.event("event", event);
        found->backend->event_synchronize(*found);
    });
}

infiniStatus_t infinirtEventDestroy(infinirtEvent_t event) {
    return enter(__func__, [&](const Call &call) { call.take(events, "event", event); });
}

infiniStatus_t infinirtEventElapsedTime(float *ms_ptr, infinirtEvent_t start, infinirtEvent_t end) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("ms_ptr", ms_ptr);
        const auto first = call.event("start", start), second = call.event("end", end);
        call.one_device(*first, *second, "start and end");
        if (((first->flags | second->flags) & INFINIRT_EVENT_DISABLE_TIMING) != 0) {
            call.refuse(INFINI_STATUS_BAD_PARAM, (first->flags & INFINIRT_EVENT_DISABLE_TIMING) != 0 ? "start" : "end",
                        " must be an event with timing, got one made with INFINIRT_EVENT_DISABLE_TIMING");
        }
        *ms_ptr = first->backend->event_elapsed_time(*first, *second);
    });
}

// ---- memory ----

infiniStatus_t infinirtMalloc(void **p_ptr, size_t size) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("p_ptr", p_ptr);
        void *ptr = nullptr;
        if (size > 0) {
            ptr = current_backend().malloc(current.id, size);
            call.allocated(current, false, size, ptr);
        }
        *p_ptr = ptr;
    });
}

infiniStatus_t infinirtMallocHost(void **p_ptr, size_t size) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("p_ptr", p_ptr);
        void *ptr = nullptr;
        if (size > 0) {
            ptr = current_backend().malloc_host(current.id, size);
            call.allocated(current, true, size, ptr);
        }
        *p_ptr = ptr;
    });
}

infiniStatus_t infinirtFree(void *ptr) {
    return enter(__func__, [&](const Call &call) {
        if (ptr != nullptr) {
            const Allocation allocation = call.take_memory(current, false, ptr);
            or_keep(ptr, allocation, [&] { current_backend().free(current.id, ptr); });
        }
    });
}

infiniStatus_t infinirtFreeHost(void *ptr) {
    return enter(__func__, [&](const Call &call) {
        if (ptr != nullptr) {
            const Allocation allocation = call.take_memory(current, true, ptr);
            const Device device = allocation.device;
            or_keep(ptr, allocation, [&] { backend_of(device.type)->free_host(device.id, ptr); });
        }
    });
}

infiniStatus_t infinirtMemcpy(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind) {
    return enter(__func__, [&](const Call &call) {
        call.copy(current, dst, src, size, kind);
        if (size > 0) {
            current_backend().memcpy(current.id, dst, src, size, kind);
        }
    });
}

infiniStatus_t infinirtMemcpyAsync(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind,
                                   infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        const auto queue = call.stream_or_null(stream);
        call.copy(queue == nullptr ? current : device_of(*queue), dst, src, size, kind);
        if (size == 0) {
            return;
        }
        if (queue == nullptr) {
            current_backend().memcpy(current.id, dst, src, size, kind);
        } else {
            queue->backend->memcpy_async(dst, src, size, kind, *queue);
        }
    });
}

infiniStatus_t infinirtMallocAsync(void **p_ptr, size_t size, infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        call.not_null("p_ptr", p_ptr);
        const auto queue = call.stream_or_null(stream);
        const Device device = queue == nullptr ? current : device_of(*queue);
        void *ptr = nullptr;
        if (size > 0) {
            ptr = queue == nullptr ? current_backend().malloc(device.id, size)
                                   : queue->backend->malloc_async(size, *queue);
            call.allocated(device, false, size, ptr);
        }
        *p_ptr = ptr;
    });
}

infiniStatus_t infinirtFreeAsync(void *ptr, infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        const auto queue = call.stream_or_null(stream);
        if (ptr == nullptr) {
            return;
        }
        const Device device = queue == nullptr ? current : device_of(*queue);
        const Allocation allocation = call.take_memory(device, false, ptr);
        or_keep(ptr, allocation, [&] {
            if (queue == nullptr) {
                current_backend().free(device.id, ptr);
            } else {
                queue->backend->free_async(ptr, *queue);
            }
        });
    });
}

// ---- graphs ----

infiniStatus_t infinirtStreamBeginCapture(infinirtStream_t stream, infinirtStreamCaptureMode_t mode) {
    return enter(__func__, [&](const Call &call) {
        if (stream == nullptr) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "stream must be a stream that was created, got NULL");
        }
        const auto queue = call.stream(stream);
        if (number_of(mode) > INFINIRT_STREAM_CAPTURE_MODE_RELAXED) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "mode must be an infinirtStreamCaptureMode_t, 0 to ",
                        INFINIRT_STREAM_CAPTURE_MODE_RELAXED, ", got ", static_cast<int>(number_of(mode)));
        }
        queue->backend->stream_begin_capture(*queue, mode);
    });
}

infiniStatus_t infinirtStreamEndCapture(infinirtStream_t stream, infinirtGraph_t *graph_ptr) {
    return enter(__func__, [&](const Call &call) {
        if (stream == nullptr) {
            call.refuse(INFINI_STATUS_BAD_PARAM, "stream must be a stream that was created, got NULL");
        }
        const auto queue = call.stream(stream);
        call.not_null("graph_ptr", graph_ptr);
        *graph_ptr = hand_out(graphs, queue->backend->stream_end_capture(*queue), device_of(*queue));
    });
}

infiniStatus_t infinirtGraphDestroy(infinirtGraph_t graph) {
    return enter(__func__, [&](const Call &call) { call.take(graphs, "graph", graph); });
}

infiniStatus_t infinirtGraphInstantiate(infinirtGraphExec_t *graph_exec_ptr, infinirtGraph_t graph,
                                        infinirtGraphNode_t *node_ptr, char *log_buffer, size_t buffer_size) {
    infinirtGraphNode_t fault = nullptr;
    const infiniStatus_t status = enter(__func__, [&](const Call &call) {
        call.not_null("graph_exec_ptr", graph_exec_ptr);
        const auto found = call.graph(graph);
        *graph_exec_ptr = hand_out(graph_execs, found->backend->graph_instantiate(*found, &fault), device_of(*found));
    });
    if (node_ptr != nullptr) {
        *node_ptr = fault;
    }
    if (log_buffer != nullptr && buffer_size > 0) {
        const char *const log = status == INFINI_STATUS_SUCCESS ? "" : infiniGetLastErrorMessage();
        const size_t length = std::min(std::strlen(log), buffer_size - 1);
        std::memcpy(log_buffer, log, length);
        log_buffer[length] = '\0';
    }
    return status;
}

infiniStatus_t infinirtGraphExecDestroy(infinirtGraphExec_t graph_exec) {
    return enter(__func__, [&](const Call &call) { call.take(graph_execs, "graph_exec", graph_exec); });
}

infiniStatus_t infinirtGraphLuanch(infinirtGraphExec_t graph_exec, infinirtStream_t stream) {
    return enter(__func__, [&](const Call &call) {
        const auto found = call.graph_exec(graph_exec);
        const auto queue = call.stream_or_null(stream);
        if (queue != nullptr) {
            call.one_device(*found, *queue, "graph_exec and stream");
        }
        found->backend->graph_launch(*found, queue.get());
    });
}
