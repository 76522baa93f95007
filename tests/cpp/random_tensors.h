// Tensors of random numbers, of given integers, and the bytes of tensors: for tests that compare bits.
#pragma once

#include <infinicore.hpp>

#include <cstring>
#include <random>
#include <vector>

using namespace infinicore;

using Tensors = std::vector<Tensor>;

inline std::mt19937 generator(7);

// Of F32 and BF16: normal; of F16: from 1/8 to 4, of either sign.
inline Tensor random(const Shape &shape, DataType dtype, const Device &device) {
    Tensor host = Tensor::empty(shape, dtype, Device::cpu());
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < host->numel(); ++i) {
        const float value = normal(generator);
        if (dtype == DataType::F32) {
            std::memcpy(host->data() + 4 * i, &value, 4);
        } else if (dtype == DataType::BF16) { // the upper half
            std::memcpy(host->data() + 2 * i, reinterpret_cast<const char *>(&value) + 2, 2);
        } else {
            const auto bits = static_cast<uint32_t>(generator());
            const auto half = static_cast<uint16_t>((bits & 0x83ff) | (12 + (bits >> 16) % 5) << 10);
            std::memcpy(host->data() + 2 * i, &half, 2);
        }
    }
    return host->to(device);
}

inline Tensor integers(const std::vector<int64_t> &values, const Device &device) {
    const Tensor blob =
        Tensor::from_blob(const_cast<int64_t *>(values.data()), {values.size()}, DataType::I64, Device::cpu());
    return op::rearrange(blob)->to(device);
}

inline std::vector<std::byte> bytes(const Tensor &tensor) {
    const Tensor host = tensor->contiguous()->to(Device::cpu());
    context::syncStream(); // with INFINI_CPU_STREAMS=queued the CPU computes later, too
    return std::vector<std::byte>(host->data(), host->data() + host->nbytes());
}

inline std::vector<std::vector<std::byte>> bytes(const Tensors &tensors) {
    std::vector<std::vector<std::byte>> all;
    for (const Tensor &tensor : tensors) {
        all.push_back(bytes(tensor));
    }
    return all;
}
