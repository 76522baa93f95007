// Backend: the interface of a device type to infinirt. A derived class adds a device, either in a folder of its own to
// the build, or in a vendor's library to a process; no other file changes. infinirt.cpp checks all arguments and
// handles before it calls a backend, which only calls its driver and throws an Error if that fails.
// CONTRIBUTING.md, "Bring up a device".
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "execution_context.h" // name_of
#include "infinirt.h"
#include "status.h"

namespace infini::runtime {

class Backend;

struct Device {
    infiniDevice_t type = INFINI_DEVICE_CPU;
    int id = 0;
};

// The objects behind the handles of the C interface. A backend derives its own from these; infinirt.cpp sets the
// members and keeps an object alive while a call uses it.
struct Object {
    Backend *backend = nullptr;
    int device_id = 0;
    virtual ~Object() = default;
};
struct Stream : Object {
    void *handle = this;     // the caller's handle; a backend may set its driver's handle
    int foreign_handles = 0; // how often the caller has registered a stream that infinirt did not create
};
struct Event : Object {
    uint32_t flags = 0; // infinirtEventFlags_t
};
struct Graph : Object {};
struct GraphExec : Object {};

// Functions are named after those of infinirt.h, where they are documented. They are called from any thread,
// concurrently; device_id is in range. A function that waits must not hold a lock that other functions need.
class INFINI_API Backend {
public:
    virtual ~Backend() = default;
    infiniDevice_t type = INFINI_DEVICE_CPU; // set when it is registered

    // ---- minimal: every backend has these ----

    // Returns 0 if the driver or the device is missing, which is no error. Called often: cache the result.
    virtual int device_count() = 0;
    // Sets the calling thread's device in the driver. All other functions take the device as an argument.
    virtual void set_device(int device_id) = 0;
    virtual void device_synchronize(int device_id) = 0;

    virtual std::shared_ptr<Stream> stream_create(int device_id) = 0;
    // A stream that queues its work: the only kind that devices have, and an option of the CPU.
    virtual std::shared_ptr<Stream> stream_create_queued(int device_id) { return stream_create(device_id); }
    virtual void stream_destroy(Stream &stream) = 0; // waits; the last shared_ptr frees the object
    virtual void stream_synchronize(Stream &stream) = 0;

    // size is not 0. Returns nullptr if memory is short.
    virtual void *malloc(int device_id, size_t size) = 0;
    virtual void *malloc_host(int device_id, size_t size) = 0;
    virtual void free(int device_id, void *ptr) = 0; // waits for the device's queued work first
    virtual void free_host(int device_id, void *ptr) = 0;

    // size is not 0.
    virtual void memcpy(int device_id, void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind) = 0;
    virtual void memcpy_async(void *dst, const void *src, size_t size, infinirtMemcpyKind_t kind, Stream &stream) = 0;

    // ---- advanced: unless noted, the defaults throw NOT_IMPLEMENTED ----
    // A stream passed by pointer may be nullptr: the work is done on return.

    // Whether the host may read and write what malloc() returned. The argument is the device's number.
    virtual bool is_host_accessible(int) { return false; }

    virtual std::shared_ptr<Event> event_create(int device_id, uint32_t flags);
    virtual void event_record(Event &event, Stream *stream);
    virtual infinirtEventStatus_t event_query(Event &event);
    virtual void event_synchronize(Event &event);
    virtual float event_elapsed_time(Event &start, Event &end);
    virtual void stream_wait_event(Stream &stream, Event &event);

    virtual void *malloc_async(size_t size, Stream &stream);
    virtual void free_async(void *ptr, Stream &stream);

    virtual void stream_launch_host_function(Stream *stream, infinirtHostFunction_t function, void *data,
                                             void (*release)(void *));

    // A stream that the caller has created with the driver; the driver's handle is its handle.
    virtual std::shared_ptr<Stream> stream_from_native(int device_id, void *native);
    // Calls body(native stream) while the device is the driver's current one.
    virtual void stream_enqueue(int device_id, void *native, const std::function<void(void *)> &body);

    virtual void stream_begin_capture(Stream &stream, infinirtStreamCaptureMode_t mode);
    virtual std::shared_ptr<Graph> stream_end_capture(Stream &stream);
    // Before it throws, it may set *fault to the node that cannot be instantiated.
    virtual std::shared_ptr<GraphExec> graph_instantiate(Graph &graph, infinirtGraphNode_t *fault);
    virtual void graph_launch(GraphExec &exec, Stream *stream);

private:
    [[noreturn]] void not_implemented(const char *function) const;
};

// Returns nullptr if this build has no backend for that type.
Backend *backend_of(infiniDevice_t type);

INFINI_API void register_backend(infiniDevice_t type, Backend *backend);

// Adds a backend to the build, by a constant in its own source:
//     const Registered<CpuBackend> registered{INFINI_DEVICE_CPU};
// The backend is made when the library is loaded (no driver calls in its constructor) and never destroyed.
template <typename Derived> struct Registered {
    explicit Registered(infiniDevice_t type) { register_backend(type, new Derived); }
};

} // namespace infini::runtime
