// The emulated CUDA runtime: one device whose memory is the host's.
#include <cstring>

#include "../common/cuda/kernel.h"
#include "emulator.h"

bool infini::emulates_cuda() {
    return true;
}

// How a process tells that it has loaded the emulated libraries.
extern "C" __attribute__((visibility("default"))) int infinirtEmulatesCuda() {
    return 1;
}

void infini::emulation::enqueue(cudaStream_t, std::function<void()> work) {
    work();
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "invalid value";
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = 8; // few, so that what is split among multiprocessors is split in small tests too
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) {
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream) {
    infini::emulation::enqueue(stream, [=] { std::memset(p, value, size); });
    return cudaSuccess;
}
