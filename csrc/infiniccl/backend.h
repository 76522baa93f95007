// Backend: the interface of a device type to infiniccl. A class derived from it, in a separate folder, adds a device to
// the build; no other file changes. infiniccl.cpp has checked all arguments and handles before it calls a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "infiniccl.h"
#include "status.h"

namespace infini::ccl {

enum class Kind : uint8_t { init, all_reduce, broadcast, all_gather, reduce_scatter, send, recv };

// One call on one rank, its arguments checked.
struct Call {
    const char *function; // "infinicclAllReduce"
    Kind kind;
    const void *send; // nullptr where this rank sends nothing
    void *recv;       // nullptr where it receives nothing
    size_t count;     // as the caller gave it: the elements of one rank's share
    infiniDtype_t dtype;
    infinicclReduceOp_t op; // SUM where nothing is reduced
    int peer;               // the root, or the other rank; 0 where there is none
};

// One rank's communicator. run() and abort() are called from any thread, at the same time.
class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(infiniDevice_t device, int device_id, int rank, int ranks)
        : device(device), device_id(device_id), rank(rank), ranks(ranks) {}
    virtual ~Communicator() = default;
    const infiniDevice_t device;
    const int device_id, rank, ranks;

    // Queues the call; with a NULL stream it is done on return.
    virtual void run(const Call &call, infinirtStream_t stream) = 0;
    virtual void abort() = 0;
    virtual void set_timeout(int64_t timeout_ms) = 0; // above 0
};

using Communicators = std::vector<std::shared_ptr<Communicator>>;

// Functions are named after those of infiniccl.h. They are called from any thread; devices are there.
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
// destroyed: streams' threads may still run at exit.
template <typename Derived> struct Registered {
    explicit Registered(infiniDevice_t type) { register_backend(type, new Derived); }
};

} // namespace infini::ccl
