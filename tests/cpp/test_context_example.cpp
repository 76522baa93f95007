// The program of the reference's document on the context, with a matrix product where it leaves one out; on a device that
// is there, and with smaller memory.
// Usage: test_context_example [CPU | NVIDIA]
#include <infinicore/context/context.hpp>
#include <infinicore/ops.hpp>
#include <infinicore/tensor.hpp>

#include <iostream>
#include <vector>

#include "device.h"

using namespace infinicore;

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    context::setDevice(device);
    std::cout << "devices of this type: " << context::getDeviceCount(device.getType()) << std::endl;

    auto device_mem = context::allocateMemory(16 * 1024 * 1024);
    auto pinned_mem = context::allocatePinnedHostMemory(4 * 1024 * 1024);
    std::vector<float> host_data(1024, 1.0f);
    context::memcpyH2D(device_mem->data(), host_data.data(), host_data.size() * sizeof(float), true);
    context::syncStream();

    auto start = context::createEvent();
    auto end = context::createEvent();
    context::recordEvent(start, context::getStream());
    Tensor a = Tensor::from_blob(device_mem->data(), {32, 32}, DataType::FLOAT32, device);
    Tensor b = op::matmul(a, a);
    context::recordEvent(end, context::getStream());
    context::synchronizeEvent(end);
    std::cout << "kernel time: " << context::elapsedTime(start, end) << " ms" << std::endl;
    context::destroyEvent(start);
    context::destroyEvent(end);

    context::startGraphRecording();
    Tensor input1 = Tensor::zeros({128, 256}, DataType::FLOAT32, device);
    Tensor input2 = Tensor::ones({256, 128}, DataType::FLOAT32, device);
    Tensor product = op::matmul(op::add(input1, input1), input2);
    auto graph = context::stopGraphRecording();
    for (int i = 0; i < 100; ++i) {
        graph->run();
    }
    const Tensor result = product->to(Device::cpu()), squares = b->to(Device::cpu());
    const float zero = reinterpret_cast<const float *>(result->data())[128 * 128 - 1];
    const float square = reinterpret_cast<const float *>(squares->data())[7];
    std::cout << "product: " << zero << ", " << square << std::endl;
    return zero == 0.0f && square == 32.0f ? 0 : 1;
}
