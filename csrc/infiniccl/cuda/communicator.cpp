// Communicators of NVIDIA devices, by NCCL, which is loaded at the first use: everything else works without it.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

#include "../backend.h"
#include "dtype.h"
#include "guard.h"
#include "nccl.h"

namespace infini::ccl {

namespace {

// Throws if the library is missing; the next call then looks again.
const nccl::Functions &functions() {
    static const nccl::Functions loaded = [] {
        const char *given = std::getenv("INFINI_NCCL_LIBRARY");
        const char *const name = given != nullptr && *given != 0 ? given : "libnccl.so.2";
        void *const library = dlopen(name, RTLD_NOW | RTLD_LOCAL); // never closed
        if (library == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR,
                        message("infiniccl: NCCL cannot be loaded (", dlerror(),
                                "): install it, or name its library in INFINI_NCCL_LIBRARY"));
        }
        nccl::Functions found;
        const auto look_up = [&](auto &pointer, const char *function) {
            void *const address = dlsym(library, function);
            if (address == nullptr) {
                throw Error(INFINI_STATUS_INTERNAL_ERROR, message("infiniccl: ", name, " has no ", function));
            }
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(address);
        };
#define INFINI_NCCL_LOOK_UP(Type, Name, arguments) look_up(found.Name, "nccl" #Name);
        INFINI_NCCL_FUNCTIONS(INFINI_NCCL_LOOK_UP)
#undef INFINI_NCCL_LOOK_UP
        return found;
    }();
    return loaded;
}

void check_nccl(const char *function, nccl::Result result) {
    if (result != nccl::kSuccess) {
        const bool callers = result == nccl::kInvalidArgument || result == nccl::kInvalidUsage;
        throw Error(callers ? INFINI_STATUS_BAD_PARAM : INFINI_STATUS_INTERNAL_ERROR,
                    message(function, ": NCCL: ", functions().GetErrorString(result), " (", result, ")"));
    }
}

// Calls body(native stream) while the device is CUDA's current one. With a NULL stream the work is done on return.
template <typename Body> void on_device(int device_id, infinirtStream_t stream, const Body &body) {
    const auto enqueue = [](void *native, void *data) {
        return guarded([&] { (*static_cast<const Body *>(data))(native); });
    };
    const infiniStatus_t status = infinirtStreamEnqueue(INFINI_DEVICE_NVIDIA, device_id, stream, enqueue,
                                                        const_cast<void *>(static_cast<const void *>(&body)));
    if (status != INFINI_STATUS_SUCCESS) {
        throw Error(status, infiniGetLastErrorMessage());
    }
}

// The dtype, count and op that a call passes to NCCL, which lacks some of our dtypes: data that is only moved is sent
// as bytes, and bools are reduced by MAX ("any") and MIN ("all").
struct Elements {
    nccl::DataType dtype;
    size_t count;
    nccl::RedOp op;
};

Elements elements_of(const Call &call) {
    nccl::DataType dtype;
    switch (call.dtype) {
    case INFINI_DTYPE_I8:
        dtype = nccl::kInt8;
        break;
    case INFINI_DTYPE_BYTE:
    case INFINI_DTYPE_U8:
        dtype = nccl::kUint8;
        break;
    case INFINI_DTYPE_BOOL:
        return {nccl::kUint8, call.count,
                call.op == INFINICCL_SUM || call.op == INFINICCL_MAX ? nccl::kMax : nccl::kMin};
    case INFINI_DTYPE_I32:
        dtype = nccl::kInt32;
        break;
    case INFINI_DTYPE_U32:
        dtype = nccl::kUint32;
        break;
    case INFINI_DTYPE_I64:
        dtype = nccl::kInt64;
        break;
    case INFINI_DTYPE_U64:
        dtype = nccl::kUint64;
        break;
    case INFINI_DTYPE_F16:
        dtype = nccl::kFloat16;
        break;
    case INFINI_DTYPE_F32:
        dtype = nccl::kFloat32;
        break;
    case INFINI_DTYPE_F64:
        dtype = nccl::kFloat64;
        break;
    case INFINI_DTYPE_BF16:
        dtype = nccl::kBfloat16;
        break;
    default:
        if (call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter) {
            throw Error(INFINI_STATUS_BAD_TENSOR_DTYPE,
                        message(call.function, ": datatype must be one that NCCL reduces, got ", name_of(call.dtype)));
        }
        return {nccl::kUint8, call.count * size_of(call.dtype), call.op};
    }
    return {dtype, call.count, call.op};
}

class NcclCommunicator : public Communicator {
public:
    NcclCommunicator(int device_id, int rank, int ranks, nccl::Comm comm)
        : Communicator(INFINI_DEVICE_NVIDIA, device_id, rank, ranks), comm_(comm) {}

    ~NcclCommunicator() override {
        if (const nccl::Comm comm = comm_.exchange(nullptr)) {
            functions().CommDestroy(comm);
        }
    }

    void run(const Call &call, infinirtStream_t stream) override {
        const nccl::Comm comm = comm_;
        if (comm == nullptr) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message(call.function, ": the communicator has been aborted"));
        }
        const Elements elements = elements_of(call);
        on_device(device_id, stream,
                  [&](nccl::Stream native) { check_nccl(call.function, launch(call, elements, comm, native)); });
    }

    void abort() override {
        if (const nccl::Comm comm = comm_.exchange(nullptr)) {
            check_nccl("infinicclCommAbort", functions().CommAbort(comm));
        }
    }

    void set_timeout(int64_t) override {
        throw Error(INFINI_STATUS_NOT_IMPLEMENTED, "infinicclCommSetTimeout: NCCL has no timeouts");
    }

private:
    static nccl::Result launch(const Call &call, const Elements &e, nccl::Comm comm, nccl::Stream stream) {
        const nccl::Functions &f = functions();
        switch (call.kind) {
        case Kind::all_reduce:
            return f.AllReduce(call.send, call.recv, e.count, e.dtype, e.op, comm, stream);
        case Kind::broadcast:
            return f.Broadcast(call.send, call.recv, e.count, e.dtype, call.peer, comm, stream);
        case Kind::all_gather:
            return f.AllGather(call.send, call.recv, e.count, e.dtype, comm, stream);
        case Kind::reduce_scatter:
            return f.ReduceScatter(call.send, call.recv, e.count, e.dtype, e.op, comm, stream);
        case Kind::send:
            return f.Send(call.send, e.count, e.dtype, call.peer, comm, stream);
        default:
            return f.Recv(call.recv, e.count, e.dtype, call.peer, comm, stream);
        }
    }

    std::atomic<nccl::Comm> comm_; // nullptr: aborted, which has freed it
};

class NcclBackend : public Backend {
public:
    infinicclUniqueId_t unique_id() override {
        infinicclUniqueId_t id;
        check_nccl("infinicclGetUniqueId", functions().GetUniqueId(&id));
        return id;
    }

    Communicators init_all(const std::vector<int> &device_ids, int64_t) override {
        const int ranks = static_cast<int>(device_ids.size());
        std::vector<nccl::Comm> comms(device_ids.size());
        check_nccl("infinicclCommInitAll", functions().CommInitAll(comms.data(), ranks, device_ids.data()));
        Communicators made;
        for (int rank = 0; rank < ranks; ++rank) {
            const auto at = static_cast<size_t>(rank);
            made.push_back(std::make_shared<NcclCommunicator>(device_ids[at], rank, ranks, comms[at]));
        }
        return made;
    }

    std::shared_ptr<Communicator> init_rank(int ranks, const infinicclUniqueId_t &id, int rank, int device_id,
                                            int64_t) override {
        nccl::Comm comm = nullptr;
        on_device(device_id, nullptr, [&](nccl::Stream) {
            check_nccl("infinicclCommInitRank", functions().CommInitRank(&comm, ranks, id, rank));
        });
        return std::make_shared<NcclCommunicator>(device_id, rank, ranks, comm);
    }
};

const Registered<NcclBackend> registered{INFINI_DEVICE_NVIDIA};

} // namespace

} // namespace infini::ccl
