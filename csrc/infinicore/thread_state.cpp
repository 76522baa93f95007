// A thread's streams, and their destruction.
#include "thread_state.h"

#include <cstdlib>
#include <cstring>

#include "error.h"

namespace infinicore {

namespace {

thread_local ThreadState *state = nullptr;
thread_local bool ended = false;

// Its destructor runs when the thread ends; memory freed after that finds no ThreadState.
struct Owner {
    ~Owner() {
        ThreadState *const last = state;
        state = nullptr;
        ended = true;
        delete last;
    }
};

std::atomic<uint64_t> next_id{1};

} // namespace

ThreadState *ThreadState::current() {
    if (state == nullptr && !ended) {
        static thread_local Owner owner;
        (void)owner;
        state = new ThreadState;
    }
    return state;
}

StreamId ThreadState::stream(const Device &device, bool make) {
    std::vector<StreamId> &streams = streams_.at(static_cast<size_t>(device.getType()));
    const size_t index = device.getIndex();
    if (index < streams.size() && streams[index].id != 0) {
        return streams[index];
    }
    if (!make) {
        return {};
    }
    const DeviceScope scope(device); // throws if the device does not exist
    infinirtStream_t stream = nullptr;
    check(infinirtStreamCreate(&stream));
    if (index >= streams.size()) {
        streams.resize(index + 1);
    }
    return streams[index] = StreamId{next_id.fetch_add(1, std::memory_order_relaxed), stream};
}

bool ThreadState::cpu_streams_queue() {
    static const bool queues = [] {
        const char *const kind = std::getenv("INFINI_CPU_STREAMS");
        return kind != nullptr && std::strcmp(kind, "immediate") != 0;
    }();
    return queues;
}

infinirtStream_t ThreadState::launch_stream(const Device &device) {
    const bool is_direct = device.getType() == Device::Type::CPU && !is_exposed_ && !cpu_streams_queue();
    return is_direct ? nullptr : stream(device).stream;
}

ThreadState::~ThreadState() {
    recording.reset();
    for (size_t type = 0; type < streams_.size(); ++type) {
        for (size_t index = 0; index < streams_[type].size(); ++index) {
            const StreamId &stream = streams_[type][index];
            if (stream.id != 0) {
                const Device device(static_cast<Device::Type>(type), index);
                infinirtStreamSynchronize(stream.stream); // a failure of its work cannot be reported to anyone
                CachingAllocator::of(device, CachingAllocator::Kind::Device).retire(stream);
                CachingAllocator::of(device, CachingAllocator::Kind::Pinned).retire(stream);
                infinirtStreamDestroy(stream.stream);
            }
        }
    }
}

DeviceScope::~DeviceScope() {
    infinirtSetDevice(static_cast<infiniDevice_t>(before_.getType()), static_cast<int>(before_.getIndex()));
}

} // namespace infinicore
