// The C ABI of an op, derived from its Args, its check and its run. A file <op>_c.cpp names these once (COp) and maps
// descriptors and addresses to views. This header handles handles, lifetimes, workspaces, streams, NULL and errors in
// the same way for all ops.
#pragma once

#include <memory>

#include "guard.h"
#include "infiniop.h"
#include "kernel_table.h"
#include "handle_table.h"
#include "tensor_view.h"

namespace infini::c_api {

// An operator descriptor. The public struct is its base, so that its address is the caller's handle.
struct Descriptor : InfiniopDescriptor {
    const void *op = nullptr; // the COp that created it
    const char *name = "";    // and that op's name, "RMSNorm"
    size_t workspace_size = 0;
};

template <typename Args> struct ArgsDescriptor : Descriptor {
    Args args;
};

// Look up a handle. Throw an Error that names `function` if the pointer is NULL or not the handle of a live object.
InfiniopHandle checked_handle(const Function &function, infiniopHandle_t handle);
TensorView checked_view(const Function &function, const char *argument, infiniopTensorDescriptor_t desc);
std::shared_ptr<Descriptor> checked_descriptor(const Function &function, const void *desc);

HandleTable<Descriptor> &descriptors();

// The argument of COp::create's `fill`: returns the views of tensor descriptors.
class Tensors {
public:
    Tensors(const Function &function, const ExecutionContext &context) : function_(function), context_(context) {}
    TensorView operator()(const char *argument, infiniopTensorDescriptor_t desc) const {
        return checked_view(function_, argument, desc);
    }
    // Returns an absent view, of dtype INFINI_DTYPE_INVALID, for NULL.
    TensorView optional(const char *argument, infiniopTensorDescriptor_t desc) const {
        return desc == nullptr ? TensorView{} : checked_view(function_, argument, desc);
    }
    const Function &function() const { return function_; }
    const ExecutionContext &context() const { return context_; } // of the handle's device, without a stream

private:
    const Function &function_;
    const ExecutionContext &context_;
};

// The argument of COp::launch's `bind`: sets a view's memory.
class Memory {
public:
    explicit Memory(const Function &function) : function_(function) {}
    // Throws for NULL, unless the view has no elements or is absent.
    void operator()(TensorView &view, const char *argument, const void *data) const;
    const Function &function() const { return function_; }

private:
    const Function &function_;
};

template <typename Args> class COp {
public:
    using Run = void (*)(const ExecutionContext &, const Args &);
    using Workspace = size_t (*)(const ExecutionContext &, const Args &);

    // `name` as in infiniopCreate<name>Descriptor. kernels: the op's table, with the devices that it supports. check:
    // all rules that do not depend on memory, for views that may have none yet. run: checks again, with memory, and
    // computes. workspace: the bytes that run needs at args.workspace.
    constexpr COp(const char *name, const KernelDevices &kernels, void (*check)(const Args &), Run run,
                  Workspace workspace = nullptr)
        : name_(name), kernels_(kernels), check_(check), run_(run), workspace_(workspace) {}

    // fill(Args &, const Tensors &) sets the views of Args.
    template <typename Fill>
    infiniStatus_t create(infiniopHandle_t handle, InfiniopDescriptor **desc_ptr, const Fill &fill) const noexcept {
        const Function function("infiniopCreate", name_, "Descriptor");
        return guarded(function, [&] {
            not_null(function, "desc_ptr", desc_ptr);
            const InfiniopHandle device = checked_handle(function, handle);
            if (!kernels_.has(device.device)) {
                throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                            message(function, ": handle must be of a device that this op has a kernel for (",
                                    kernels_.names(), "), got one of ", infini::name_of(device.device)));
            }
            const ExecutionContext context{device.device, device.device_id};
            auto made = std::make_shared<ArgsDescriptor<Args>>();
            made->device_type = device.device;
            made->device_id = device.device_id;
            made->op = this;
            made->name = name_;
            fill(made->args, Tensors(function, context));
            check_(made->args);
            made->workspace_size = workspace_ == nullptr ? 0 : workspace_(context, made->args);
            InfiniopDescriptor *const address = made.get();
            descriptors().insert(std::move(made));
            *desc_ptr = address;
        });
    }

    infiniStatus_t workspace_size(const InfiniopDescriptor *desc, size_t *size) const noexcept {
        const Function function("infiniopGet", name_, "WorkspaceSize");
        return guarded(function, [&] {
            not_null(function, "size", size);
            *size = own(function, desc)->workspace_size;
        });
    }

    // bind(Args &, const Memory &) sets the views' memory and the other arguments of a run.
    template <typename Bind>
    infiniStatus_t launch(const InfiniopDescriptor *desc, void *workspace, size_t workspace_size, void *stream,
                          const Bind &bind) const noexcept {
        const Function function("infiniop", name_);
        return guarded(function, [&] {
            const std::shared_ptr<Descriptor> found = own(function, desc);
            if (workspace_size < found->workspace_size) {
                throw Error(INFINI_STATUS_INSUFFICIENT_WORKSPACE,
                            message(function, ": workspace_size must be at least ", found->workspace_size, ", got ",
                                    workspace_size));
            }
            if (found->workspace_size > 0) {
                not_null(function, "workspace", workspace);
            }
            Args args = static_cast<const ArgsDescriptor<Args> &>(*found).args;
            bind(args, Memory(function));
            if constexpr (has_workspace<Args>(0)) {
                args.workspace = workspace;
            }
            const ExecutionContext context{found->device_type, found->device_id};
            if (!context.is_cpu()) {
                enqueue(context, args, stream);
            } else if (stream == nullptr) {
                run_(context, args);
            } else {
                check_(args);
                queue(context, args, stream);
            }
        });
    }

    infiniStatus_t destroy(const InfiniopDescriptor *desc) const noexcept {
        return guarded([&] {
            own({"infiniopDestroy", name_, "Descriptor"}, desc);
            descriptors().erase(desc);
        });
    }

private:
    template <typename A> static constexpr auto has_workspace(int) -> decltype(A::workspace, bool()) { return true; }
    template <typename A> static constexpr bool has_workspace(long) { return false; }

    // The descriptor; throws unless it is live and belongs to this op.
    std::shared_ptr<Descriptor> own(const Function &function, const InfiniopDescriptor *desc) const {
        std::shared_ptr<Descriptor> found = checked_descriptor(function, desc);
        if (found->op != this) {
            throw Error(INFINI_STATUS_BAD_PARAM,
                        message(function, ": desc must be a descriptor of ", name_, ", got one of ", found->name));
        }
        return found;
    }

    // Queues the kernels on the driver's stream while the descriptor's device is current. With NULL they are done on
    // return.
    void enqueue(const ExecutionContext &context, const Args &args, void *stream) const {
        struct Launch {
            const Args &args;
            Run run;
            ExecutionContext context;
        } launch{args, run_, context};
        const auto run = [](void *native, void *data) {
            auto &launched = *static_cast<Launch *>(data);
            launched.context.stream = native;
            return guarded([&] { launched.run(launched.context, launched.args); });
        };
        const infiniStatus_t status =
            infinirtStreamEnqueue(context.device_type, context.device_id, stream, run, &launch);
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status, infiniGetLastErrorMessage());
        }
    }

    struct Queued {
        Args args;
        Run run;
        ExecutionContext context;
    };

    // Passes the whole call to a CPU stream, which runs it at once, in stream order, or in each replay of a graph.
    void queue(const ExecutionContext &context, const Args &args, void *stream) const {
        auto queued = std::make_unique<Queued>(Queued{args, run_, context});
        const infiniStatus_t status = infinirtStreamLaunchHostFunction(
            stream,
            [](void *data) {
                const auto *work = static_cast<const Queued *>(data);
                return guarded([&] { work->run(work->context, work->args); });
            },
            queued.get(), [](void *data) { delete static_cast<Queued *>(data); });
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status, infiniGetLastErrorMessage());
        }
        queued.release();
    }

    const char *name_;
    const KernelDevices &kernels_;
    void (*check_)(const Args &);
    Run run_;
    Workspace workspace_;
};

} // namespace infini::c_api

// Defines the two functions that are the same for all ops; `op` is a COp.
#define INFINIOP_WORKSPACE_SIZE(Name, op)                                                                              \
    infiniStatus_t infiniopGet##Name##WorkspaceSize(infiniop##Name##Descriptor_t desc, size_t *size) {                 \
        return (op).workspace_size(desc, size);                                                                        \
    }
#define INFINIOP_DESTROY(Name, op)                                                                                     \
    infiniStatus_t infiniopDestroy##Name##Descriptor(infiniop##Name##Descriptor_t desc) {                              \
        return (op).destroy(desc);                                                                                     \
    }
