// The functions shared by runtime.cpp (devices, memory) and streams.cpp (streams, events, captures, graphs) of the
// emulated CUDA runtime.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

namespace infini::emulation {

int current_device();

// Stores the error for cudaGetLastError() and returns it.
cudaError_t report(cudaError_t error);

// Runs the work now (a legal order) or, with INFINI_EMULATED_STREAMS=late, when it is waited for; or adds it to the
// stream's capture.
cudaError_t submit(cudaStream_t stream, std::function<void()> work);

bool is_captured(cudaStream_t stream);

// Whether work of the stream is queued: it runs late, and is not captured.
bool waits(cudaStream_t stream);

// Runs the stream's queued work.
void run_all_of(cudaStream_t stream);

// For calls such as cudaMalloc that CUDA considers unsafe during a capture: returns an error if the modes of the
// captures and of the calling thread forbid them, and invalidates the captures that do.
cudaError_t check_unsafe_call();

// For calls that wait for a whole device: an error while one of its streams is captured.
cudaError_t check_device_wait();

} // namespace infini::emulation
