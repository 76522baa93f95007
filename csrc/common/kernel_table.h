// KernelTable: the kernels of an op by device type. <op>.h declares the op's table, <op>.cpp defines it and registers
// the kernel of the CPU, <op>.cu that of CUDA, and a vendor's library its own (CONTRIBUTING.md, "Bring up a device"):
//     const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_QY, rms_norm_on_qy};
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "execution_context.h"
#include "status.h"

namespace infini {

// The part of a table that does not depend on Args: which devices have a kernel.
class KernelDevices {
public:
    bool has(infiniDevice_t type) const { return (devices_ >> type & 1) != 0; }

    std::string names() const { // "cpu, nvidia"
        std::string text;
        for (int type = 0; type < INFINI_DEVICE_TYPE_COUNT; ++type) {
            if (has(static_cast<infiniDevice_t>(type))) {
                text += message(text.empty() ? "" : ", ", name_of(static_cast<infiniDevice_t>(type)));
            }
        }
        return text;
    }

protected:
    constexpr KernelDevices() = default;
    uint32_t devices_ = 0;
};

// Constant-initialized, so that kernels may register from the constructors of any source or library, in any order;
// nothing is registered once main() runs. Arguments are checked before a kernel is called.
template <typename Args> class KernelTable : public KernelDevices {
public:
    using Run = void (*)(const ExecutionContext &, const Args &);
    using WorkspaceBytes = size_t (*)(const ExecutionContext &, const Args &);

    // op: its name in messages, "rms_norm".
    constexpr explicit KernelTable(const char *op) : op_(op) {}

    void add(infiniDevice_t type, Run run, WorkspaceBytes workspace_bytes) {
        kernels_[type] = {run, workspace_bytes};
        devices_ |= uint32_t{1} << type;
    }

    // Computes on the context's device. Throws NOT_IMPLEMENTED if that device has no kernel.
    void run(const ExecutionContext &context, const Args &args) const {
        const Run kernel = kernels_[context.device_type].run;
        if (kernel == nullptr) {
            throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                        message("infini::", op_, ": the device must be one that this op has a kernel for (", names(),
                                "), got ", name_of(context.device_type)));
        }
        kernel(context, args);
    }

    // The bytes that the kernel of the context's device needs at args.workspace.
    size_t workspace_bytes(const ExecutionContext &context, const Args &args) const {
        const WorkspaceBytes bytes = kernels_[context.device_type].workspace_bytes;
        return bytes == nullptr ? 0 : bytes(context, args);
    }

private:
    struct Kernel {
        Run run = nullptr;
        WorkspaceBytes workspace_bytes = nullptr;
    };
    const char *op_;
    Kernel kernels_[INFINI_DEVICE_TYPE_COUNT] = {};
};

// Adds a kernel to a table when the library is loaded, by a constant in the kernel's source file.
// workspace_bytes: what the kernel needs at args.workspace, for checked arguments; nullptr: nothing.
template <typename Args> struct RegisteredKernel {
    RegisteredKernel(KernelTable<Args> &table, infiniDevice_t type, typename KernelTable<Args>::Run run,
                     typename KernelTable<Args>::WorkspaceBytes workspace_bytes = nullptr) {
        table.add(type, run, workspace_bytes);
    }
};

} // namespace infini
