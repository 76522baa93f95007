// The C functions of programs: record, replay, destroy.
// Independent of the ops: OnCpu, which wraps every function that INFINI_BOX registers, records the calls.
#include "program.h"

#include "guard.h"

using infini::Program;
using infini::recording;

void *infiniTorchProgramBegin() {
    return recording == nullptr ? recording = new Program : nullptr;
}

size_t infiniTorchProgramEnd() {
    const size_t calls = recording == nullptr ? 0 : recording->size();
    recording = nullptr;
    return calls;
}

infiniStatus_t infiniTorchProgramReplay(const void *program) {
    return infini::guarded([&] {
        for (const auto &call : *static_cast<const Program *>(program)) {
            call();
        }
    });
}

void infiniTorchProgramDestroy(void *program) {
    delete static_cast<Program *>(program);
}
