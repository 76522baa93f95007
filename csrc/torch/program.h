// Program: calls of ops on the CPU, noted while they run once, and run again in a row by one C call.
// Each call is a function of a *_torch.cpp file with copies of its arguments: numbers, and handles of the tensors.
// torch_infini/runtime/programs.py, the only user of the C functions, calls them through ctypes.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "infinicore.h"

namespace infini {

using Program = std::vector<std::function<void()>>;

// Where this thread's calls are noted, or null.
inline thread_local Program *recording = nullptr;

// What is registered for CPU tensors: the function, noted first where that is wanted.
template <auto function> struct OnCpu;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)> struct OnCpu<function> {
    static Result call(Arguments... arguments) {
        if (recording != nullptr) {
            recording->push_back([=] { function(arguments...); });
        }
        return function(static_cast<Arguments &&>(arguments)...);
    }
};

} // namespace infini

extern "C" {

// A new program, which notes this thread's calls until End. NULL: this thread records already.
INFINI_API void *infiniTorchProgramBegin(void);
// The number of calls noted.
INFINI_API size_t infiniTorchProgramEnd(void);
// Runs the calls in order on this thread. The first that fails ends it: the sentence is infiniGetLastErrorMessage()'s.
INFINI_API infiniStatus_t infiniTorchProgramReplay(const void *program);
INFINI_API void infiniTorchProgramDestroy(void *program);
}
