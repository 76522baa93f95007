// Backend: the interface of a device type to infiniccl. A derived class, in a folder of its own, adds a device to the
// build; no other file changes. infiniccl.cpp checks all arguments and handles before it calls a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "infiniccl.h"
#include "status.h"

namespace infini::ccl {

enum class Kind : uint8_t { init, all_reduce, broadcast, all_gather, reduce_scatter, send, recv };

// One call on one rank, with checked arguments.
struct Call {
    const char *function; // "infinicclAllReduce"
    Kind kind;
    const void *send; // nullptr if this rank sends nothing
    void *recv;       // nullptr if this rank receives nothing
    size_t count;     // as the caller passed it: the elements of one rank's share
    infiniDtype_t dtype;
    infinicclReduceOp_t op; // SUM if the call reduces nothing
    int peer;               // the root, or the other rank; 0 if the call has neither
};

// One rank's communicator. Any threads may call run() and abort() at the same time.
class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(infiniDevice_t device, int device_id, int rank, int ranks)
        : device(device), device_id(device_id), rank(rank), ranks(ranks) {}
    virtual ~Communicator() = default;
    const infiniDevice_t device;
    const int device_id, rank, ranks;

    // Queues the call; with a NULL stream the call is done on return.
    virtual void run(const Call &call, infinirtStream_t stream) = 0;
    virtual void abort() = 0;
    virtual void set_timeout(int64_t timeout_ms) = 0; // timeout_ms is above 0
};

using Communicators = std::vector<std::shared_ptr<Communicator>>;

// Functions are named after those of infiniccl.h. They are called from any thread; the devices exist.
class Backend {
public:
    virtual ~Backend() = default;
    virtual infinicclUniqueId_t unique_id() = 0;
    virtual Communicators init_all(const std::vector<int> &device_ids, int64_t timeout_ms) = 0;
    virtual std::shared_ptr<Communicator> init_rank(int ranks, const infinicclUniqueId_t &id, int rank, int device_id,
                                                    int64_t timeout_ms) = 0;
};

void register_backend(infiniDevice_t type, Backend *backend);

// Adds a backend to the build, by a constant in its source file. It is created when the library is loaded and never
// destroyed: threads of streams may still run at exit.
template <typename Derived> struct Registered {
    explicit Registered(infiniDevice_t type) { register_backend(type, new Derived); }
};

} // namespace infini::ccl
