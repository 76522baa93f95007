// The backends of this build by device type, and the defaults of the advanced functions.
#include "backend.h"

namespace infini::runtime {

namespace {

// Zero-initialized before any constructor runs, so sources may be linked in any order.
Backend *backends[INFINI_DEVICE_TYPE_COUNT];

} // namespace

void register_backend(infiniDevice_t type, Backend *backend) {
    backend->type = type;
    backends[type] = backend;
}

Backend *backend_of(infiniDevice_t type) {
    return backends[type];
}

void Backend::not_implemented(const char *function) const {
    throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                message(function, ": the backend of ", name_of(type), " does not implement this function"));
}

std::shared_ptr<Event> Backend::event_create(int, uint32_t) {
    not_implemented("infinirtEventCreate");
}

void Backend::event_record(Event &, Stream *) {
    not_implemented("infinirtEventRecord");
}

infinirtEventStatus_t Backend::event_query(Event &) {
    not_implemented("infinirtEventQuery");
}

void Backend::event_synchronize(Event &) {
    not_implemented("infinirtEventSynchronize");
}

float Backend::event_elapsed_time(Event &, Event &) {
    not_implemented("infinirtEventElapsedTime");
}

void Backend::stream_wait_event(Stream &, Event &) {
    not_implemented("infinirtStreamWaitEvent");
}

void *Backend::malloc_async(size_t, Stream &) {
    not_implemented("infinirtMallocAsync");
}

void Backend::free_async(void *, Stream &) {
    not_implemented("infinirtFreeAsync");
}

void Backend::stream_launch_host_function(Stream *, infinirtHostFunction_t, void *, void (*)(void *)) {
    not_implemented("infinirtStreamLaunchHostFunction");
}

std::shared_ptr<Stream> Backend::stream_from_native(int, void *) {
    not_implemented("infinirtStreamFromNative");
}

void Backend::stream_enqueue(int, void *, const std::function<void(void *)> &) {
    not_implemented("infinirtStreamEnqueue");
}

void Backend::stream_begin_capture(Stream &, infinirtStreamCaptureMode_t) {
    not_implemented("infinirtStreamBeginCapture");
}

std::shared_ptr<Graph> Backend::stream_end_capture(Stream &) {
    not_implemented("infinirtStreamEndCapture");
}

std::shared_ptr<GraphExec> Backend::graph_instantiate(Graph &, infinirtGraphNode_t *) {
    not_implemented("infinirtGraphInstantiate");
}

void Backend::graph_launch(GraphExec &, Stream *) {
    not_implemented("infinirtGraphLuanch");
}

} // namespace infini::runtime
