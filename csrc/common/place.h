// Place: the device and the stream that the calling thread's present op computes on. The C ABI and the torch binding set
// it for the length of one call (PlaceScope), kernels look here. It starts as the CPU, done on return.
#pragma once

#include "infinicore.h"

namespace infini {

struct Place {
    infiniDevice_t type = INFINI_DEVICE_CPU;
    int id = 0;
    void *stream = nullptr; // of CUDA: a cudaStream_t
};

inline thread_local Place current_place;

inline bool on_cuda() {
    return current_place.type == INFINI_DEVICE_NVIDIA;
}

class PlaceScope {
public:
    explicit PlaceScope(const Place &place) : before_(current_place) { current_place = place; }
    ~PlaceScope() { current_place = before_; }
    PlaceScope(const PlaceScope &) = delete;
    PlaceScope &operator=(const PlaceScope &) = delete;

private:
    const Place before_;
};

} // namespace infini
