// What the tests of infinicore::nn share: their device, tensors of given numbers and back, and forward() run at once and
// recorded. Numbers are small and whole, so that products are exact in any order of sums.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include <infinicore.hpp>

#include "check.h"
#include "device.h"

using namespace infinicore;

inline Device device; // set by main()

using Floats = std::vector<float>;

inline Floats whole_numbers(size_t count, unsigned seed) { // from -4 to 4
    Floats values(count);
    for (float &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int>(seed >> 16) % 9 - 4);
    }
    return values;
}

inline Size count_of(const Shape &shape) {
    Size count = 1;
    for (const Size size : shape) {
        count *= size;
    }
    return count;
}

// A tensor on the device, of any element type.
template <typename T> Tensor tensor(std::vector<T> values, const Shape &shape, DataType dtype, Device on = device) {
    Tensor made = Tensor::empty(shape, dtype, on);
    made->copy_from(Tensor::from_blob(values.data(), shape, dtype, Device::cpu()));
    context::syncStream(); // a stream of the CPU may be a queue (INFINI_CPU_STREAMS), and the values end here
    return made;
}

inline Tensor floats(const Floats &values, const Shape &shape, Device on = device) {
    return tensor(values, shape, DataType::F32, on);
}

template <typename T> std::vector<T> elements(const Tensor &from) {
    const Tensor packed = from->contiguous();
    context::syncStream();
    const Tensor host = packed->to(Device::cpu());
    std::vector<T> values(host->numel());
    if (!values.empty()) {
        std::memcpy(values.data(), host->data(), host->nbytes());
    }
    return values;
}

inline Floats values_of(const Tensor &from) {
    return elements<float>(from);
}

// What `forward` gives for x, run at once, and recorded: then replayed for x and for another input.
template <typename Forward>
void both_ways(const Forward &forward, const Floats &x, const Shape &shape,
               const std::function<Floats(const Floats &)> &expected) {
    Tensor input = floats(x, shape);
    CHECK(values_of(forward(input)) == expected(x));
    context::setDevice(device);
    context::startGraphRecording();
    const Tensor out = forward(input);
    const auto graph = context::stopGraphRecording();
    for (const Floats &next : {x, whole_numbers(x.size(), 99), x}) {
        input->copy_from(floats(next, shape));
        graph->run();
        CHECK(values_of(out) == expected(next));
    }
}
