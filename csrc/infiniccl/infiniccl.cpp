// The functions of infiniccl.h. Each checks its arguments, turns handles into communicators, and calls the backend of
// the device type.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "backend.h"
#include "dtype.h"
#include "guard.h"
#include "handle_table.h"

namespace infini::ccl {

namespace {

// Zero-initialized before any constructor runs, so sources may be linked in any order.
Backend *backends[INFINI_DEVICE_TYPE_COUNT];

// Never destroyed: threads may still run while the process exits.
HandleTable<Communicator> &communicators = *new HandleTable<Communicator>;

template <typename... Parts>
[[noreturn]] void refuse(infiniStatus_t status, const char *function, const Parts &...parts) {
    throw Error(status, message(function, ": ", parts...));
}

// An enum's value as a number. C callers may pass a value out of range.
template <typename Enum> int number_of(const Enum &value) {
    return static_cast<int>(value);
}

Backend &backend_of(const char *function, infiniDevice_t type) {
    Backend *const backend =
        number_of(type) >= 0 && number_of(type) < INFINI_DEVICE_TYPE_COUNT ? backends[type] : nullptr;
    if (backend == nullptr) {
        refuse(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED, function,
               "device_type must be one that has communicators (INFINI_DEVICE_CPU, INFINI_DEVICE_NVIDIA), got ",
               number_of(type));
    }
    return *backend;
}

// Callers number CPU ranks like GPUs, so any device id of the CPU means its one device.
void check_device(const char *function, infiniDevice_t type, int device_id) {
    if (type == INFINI_DEVICE_CPU) {
        if (device_id < 0) {
            refuse(INFINI_STATUS_DEVICE_NOT_FOUND, function, "device_id must be at least 0, got ", device_id);
        }
        return;
    }
    int count = 0;
    infinirtGetDeviceCount(type, &count);
    if (device_id < 0 || device_id >= count) {
        refuse(INFINI_STATUS_DEVICE_NOT_FOUND, function, "device_id must be less than the number of devices (", count,
               "), got ", device_id);
    }
}

int64_t default_timeout_ms(const char *function) {
    const char *const text = std::getenv("INFINI_CCL_TIMEOUT");
    if (text == nullptr || *text == 0) {
        return 300 * 1000;
    }
    char *end;
    const double seconds = std::strtod(text, &end);
    if (*end != 0 || !(seconds > 0) || seconds > 1e9) {
        refuse(INFINI_STATUS_BAD_PARAM, function,
               "INFINI_CCL_TIMEOUT must be a number of seconds above 0 and at most 1e9, got '", text, "'");
    }
    return std::max<int64_t>(1, std::llround(seconds * 1000));
}

int64_t timeout_or_default(const char *function, int64_t timeout_ms) {
    if (timeout_ms < 0) {
        refuse(INFINI_STATUS_BAD_PARAM, function, "timeout_ms must be at least 0, got ", timeout_ms);
    }
    return timeout_ms == 0 ? default_timeout_ms(function) : timeout_ms;
}

std::shared_ptr<Communicator> found(const char *function, std::shared_ptr<Communicator> communicator,
                                    infinicclComm_t comm) {
    if (communicator == nullptr) {
        refuse(INFINI_STATUS_BAD_PARAM, function, "comm must be a communicator that was made and not destroyed, got ",
               static_cast<const void *>(comm));
    }
    return communicator;
}

std::shared_ptr<Communicator> communicator_of(const char *function, infinicclComm_t comm) {
    not_null(function, "comm", comm);
    return found(function, communicators.find(comm), comm);
}

infinicclComm_t hand_out(std::shared_ptr<Communicator> communicator) {
    return static_cast<infinicclComm_t>(communicators.insert(std::move(communicator)));
}

// ---- one call ----

bool is_floating(infiniDtype_t dtype) {
    return is_half(dtype) || dtype == INFINI_DTYPE_F32 || dtype == INFINI_DTYPE_F64;
}

// Whether the dtype can be reduced: real numbers, integers up to 64 bits, and bools.
bool can_reduce(infiniDtype_t dtype) {
    return is_floating(dtype) || (dtype >= INFINI_DTYPE_BYTE && dtype <= INFINI_DTYPE_U64);
}

bool share_memory(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

bool reduces(const Call &call) {
    return call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter;
}

// Checks datatype, count and operation.
void check_elements(const Call &call, int ranks) {
    const size_t bytes = size_of(call.dtype);
    if (bytes == 0 || (reduces(call) && !can_reduce(call.dtype))) {
        refuse(INFINI_STATUS_BAD_TENSOR_DTYPE, call.function, "datatype must be one that ",
               reduces(call) ? "can be reduced" : "has a size", ", got ", name_of(call.dtype), " (",
               number_of(call.dtype), ")");
    }
    if (number_of(call.op) < 0 || number_of(call.op) > INFINICCL_AVG) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function, "op must be an infinicclReduceOp_t, 0 to ",
               number_of(INFINICCL_AVG), ", got ", number_of(call.op));
    }
    if (call.op == INFINICCL_AVG && !is_floating(call.dtype)) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function, "op must not be AVG for ", name_of(call.dtype),
               ", whose mean may be none of its values");
    }
    const size_t most = PTRDIFF_MAX / bytes / static_cast<size_t>(ranks);
    if (call.count > most) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function, "count must be at most ", most, ", got ", call.count);
    }
}

// Checks the root, or the other rank.
void check_peer(const Call &call, int rank, int ranks) {
    const bool between_two = call.kind == Kind::send || call.kind == Kind::recv;
    if (call.peer < 0 || call.peer >= ranks) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function, between_two ? "peer" : "root", " must be a rank, 0 to ",
               ranks - 1, ", got ", call.peer);
    }
    if (between_two && call.peer == rank) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function, "peer must be another rank, got ", call.peer, " on rank ", rank);
    }
}

void check_buffers(const Call &call, int rank, int ranks) {
    const bool sends = call.kind != Kind::recv && (call.kind != Kind::broadcast || call.peer == rank);
    const bool receives = call.kind != Kind::send;
    if (call.count == 0) {
        return;
    }
    if (sends) {
        not_null(call.function, "sendbuf", call.send);
    }
    if (receives) {
        not_null(call.function, "recvbuf", call.recv);
    }
    if (!sends || !receives) {
        return;
    }
    // In place, the smaller buffer must be this rank's share of the larger one.
    const size_t share = call.count * size_of(call.dtype), all = share * static_cast<size_t>(ranks);
    const size_t own = share * static_cast<size_t>(rank);
    const bool gathers = call.kind == Kind::all_gather, scatters = call.kind == Kind::reduce_scatter;
    const auto *send = static_cast<const char *>(call.send), *recv = static_cast<const char *>(call.recv);
    const bool in_place = send + (scatters ? own : 0) == recv + (gathers ? own : 0);
    if (!in_place && share_memory(send, scatters ? all : share, recv, gathers ? all : share)) {
        refuse(INFINI_STATUS_BAD_PARAM, call.function,
               "recvbuf must share no memory with sendbuf, or be in place, got ", call.recv, " and ", call.send);
    }
}

infiniStatus_t run(Call call, infinicclComm_t comm, infinirtStream_t stream) {
    return guarded(call.function, [&] {
        const std::shared_ptr<Communicator> communicator = communicator_of(call.function, comm);
        check_elements(call, communicator->ranks);
        check_peer(call, communicator->rank, communicator->ranks);
        check_buffers(call, communicator->rank, communicator->ranks);
        if (call.kind == Kind::broadcast && call.peer != communicator->rank) {
            call.send = nullptr;
        }
        communicator->run(call, stream);
    });
}

} // namespace

void register_backend(infiniDevice_t type, Backend *backend) {
    backends[type] = backend;
}

} // namespace infini::ccl

using namespace infini;
using namespace infini::ccl;

// ---- communicators ----

infiniStatus_t infinicclCommInitAll(infiniDevice_t device_type, infinicclComm_t *comms, int ndevice,
                                    const int *device_ids) {
    const char *const function = __func__;
    return guarded(function, [&] {
        Backend &backend = backend_of(function, device_type);
        not_null(function, "comms", comms);
        if (ndevice < 1) {
            refuse(INFINI_STATUS_BAD_PARAM, function, "ndevice must be at least 1, got ", ndevice);
        }
        std::vector<int> devices(static_cast<size_t>(ndevice));
        for (int rank = 0; rank < ndevice; ++rank) {
            int &device = devices[static_cast<size_t>(rank)];
            device = device_ids != nullptr ? device_ids[rank] : rank;
            check_device(function, device_type, device);
        }
        Communicators made = backend.init_all(devices, default_timeout_ms(function));
        for (size_t rank = 0; rank < made.size(); ++rank) {
            comms[rank] = hand_out(std::move(made[rank]));
        }
    });
}

infiniStatus_t infinicclGetUniqueId(infiniDevice_t device_type, infinicclUniqueId_t *unique_id) {
    const char *const function = __func__;
    return guarded(function, [&] {
        Backend &backend = backend_of(function, device_type);
        not_null(function, "unique_id", unique_id);
        *unique_id = backend.unique_id();
    });
}

infiniStatus_t infinicclCommInitRank(infiniDevice_t device_type, infinicclComm_t *comm, int nranks,
                                     const infinicclUniqueId_t *unique_id, int rank, int device_id,
                                     int64_t timeout_ms) {
    const char *const function = __func__;
    return guarded(function, [&] {
        Backend &backend = backend_of(function, device_type);
        not_null(function, "comm", comm);
        not_null(function, "unique_id", unique_id);
        if (nranks < 1) {
            refuse(INFINI_STATUS_BAD_PARAM, function, "nranks must be at least 1, got ", nranks);
        }
        if (rank < 0 || rank >= nranks) {
            refuse(INFINI_STATUS_BAD_PARAM, function, "rank must be 0 to ", nranks - 1, ", got ", rank);
        }
        check_device(function, device_type, device_id);
        const int64_t timeout = timeout_or_default(function, timeout_ms);
        *comm = hand_out(backend.init_rank(nranks, *unique_id, rank, device_id, timeout));
    });
}

infiniStatus_t infinicclCommSetTimeout(infinicclComm_t comm, int64_t timeout_ms) {
    const char *const function = __func__;
    return guarded(function, [&] {
        const std::shared_ptr<Communicator> communicator = communicator_of(function, comm);
        communicator->set_timeout(timeout_or_default(function, timeout_ms));
    });
}

infiniStatus_t infinicclCommCount(infinicclComm_t comm, int *count) {
    const char *const function = __func__;
    return guarded(function, [&] {
        const std::shared_ptr<Communicator> communicator = communicator_of(function, comm);
        not_null(function, "count", count);
        *count = communicator->ranks;
    });
}

infiniStatus_t infinicclCommUserRank(infinicclComm_t comm, int *rank) {
    const char *const function = __func__;
    return guarded(function, [&] {
        const std::shared_ptr<Communicator> communicator = communicator_of(function, comm);
        not_null(function, "rank", rank);
        *rank = communicator->rank;
    });
}

infiniStatus_t infinicclCommAbort(infinicclComm_t comm) {
    const char *const function = __func__;
    return guarded(function, [&] { communicator_of(function, comm)->abort(); });
}

infiniStatus_t infinicclCommDestroy(infinicclComm_t comm) {
    const char *const function = __func__;
    return guarded(function, [&] {
        not_null(function, "comm", comm);
        found(function, communicators.erase(comm), comm);
    });
}

// ---- collectives ----

infiniStatus_t infinicclAllReduce(void *sendbuf, void *recvbuf, size_t count, infiniDtype_t datatype,
                                  infinicclReduceOp_t op, infinicclComm_t comm, infinirtStream_t stream) {
    return run({__func__, Kind::all_reduce, sendbuf, recvbuf, count, datatype, op, 0}, comm, stream);
}

infiniStatus_t infinicclBroadcast(const void *sendbuf, void *recvbuf, size_t count, infiniDtype_t datatype, int root,
                                  infinicclComm_t comm, infinirtStream_t stream) {
    return run({__func__, Kind::broadcast, sendbuf, recvbuf, count, datatype, INFINICCL_SUM, root}, comm, stream);
}

infiniStatus_t infinicclAllGather(const void *sendbuf, void *recvbuf, size_t sendcount, infiniDtype_t datatype,
                                  infinicclComm_t comm, infinirtStream_t stream) {
    return run({__func__, Kind::all_gather, sendbuf, recvbuf, sendcount, datatype, INFINICCL_SUM, 0}, comm, stream);
}

infiniStatus_t infinicclReduceScatter(const void *sendbuf, void *recvbuf, size_t recvcount, infiniDtype_t datatype,
                                      infinicclReduceOp_t op, infinicclComm_t comm, infinirtStream_t stream) {
    return run({__func__, Kind::reduce_scatter, sendbuf, recvbuf, recvcount, datatype, op, 0}, comm, stream);
}

infiniStatus_t infinicclSend(const void *sendbuf, size_t count, infiniDtype_t datatype, int peer, infinicclComm_t comm,
                             infinirtStream_t stream) {
    return run({__func__, Kind::send, sendbuf, nullptr, count, datatype, INFINICCL_SUM, peer}, comm, stream);
}

infiniStatus_t infinicclRecv(void *recvbuf, size_t count, infiniDtype_t datatype, int peer, infinicclComm_t comm,
                             infinirtStream_t stream) {
    return run({__func__, Kind::recv, nullptr, recvbuf, count, datatype, INFINICCL_SUM, peer}, comm, stream);
}
