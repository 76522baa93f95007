// Copies of tensors: on one device between layouts by the op rearrange, between devices through contiguous memory. Also
// reads a tensor on the host, to print it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "error.h"
#include "infinicore/context/context.hpp"
#include "infinicore/device_event.hpp"
#include "infinicore/ops/rearrange.hpp"
#include "infinicore/tensor.hpp"
#include "thread_state.h"

namespace infinicore {

namespace {

bool is_host(const Device &device) {
    return device.getType() == Device::Type::CPU;
}

// Throws if the tensor has not been computed yet.
void readable(const char *what, const TensorImpl &tensor) {
    if (tensor.memory()->is_recorded_only()) {
        fail("infinicore::Tensor::", what, ": a tensor that is only recorded has no values before Graph::run()");
    }
}

// Makes this thread's later work on one device wait for what it has queued on another.
void wait_for(const Device &device, const Device &waits) {
    ThreadState *const state = ThreadState::current();
    DeviceEvent event(device, INFINIRT_EVENT_DISABLE_TIMING);
    event.record(state->stream(device).stream);
    event.wait(state->stream(waits).stream);
}

// Copies the bytes of contiguous tensors between two devices, on the stream of the device that is not the host.
void copy_bytes(Tensor dst, Tensor src) {
    const Device to = dst->device(), from = src->device();
    const infinirtMemcpyKind_t kind = is_host(from) ? INFINIRT_MEMCPY_H2D
                                      : is_host(to) ? INFINIRT_MEMCPY_D2H
                                                    : INFINIRT_MEMCPY_D2D;
    const size_t bytes = src->nbytes();
    const Device works = is_host(to) ? from : to;
    context::setDevice(works);
    Recording *const recording = current_recording();
    if (recording != nullptr) {
        if (is_host(to)) {
            fail("infinicore::Tensor::copy_from: a copy to the host cannot be recorded: copy after Graph::run()");
        }
        if (!is_host(from)) { // a graph cannot wait for another device's work
            fail("infinicore::Tensor::copy_from: a copy from another device, ", from.toString(),
                 ", cannot be recorded: copy before startGraphRecording()");
        }
        // The graph keeps both tensors' memory.
        auto copy = [bytes, kind, dst, src]() mutable {
            check(infinirtMemcpyAsync(dst->data(), src->data(), bytes, kind, own_stream()));
        };
        context::addGraphOperator(std::make_shared<graph::HostOperator>(std::move(copy), "copy"));
        return;
    }
    if (is_host(from) || is_host(to)) {
        check(infinirtMemcpyAsync(dst->data(), src->data(), bytes, kind, own_stream()));
        context::syncStream(); // the host may change or free its memory as soon as this returns
    } else {
        wait_for(from, to);
        check(infinirtMemcpyAsync(dst->data(), src->data(), bytes, kind, own_stream()));
        wait_for(to, from); // `from` may write or reuse the source's memory next
    }
}

// One element, as a number to print.
double number(const std::byte *data, DataType dtype) {
    const auto as = [data](auto value) {
        std::memcpy(&value, data, sizeof value);
        return static_cast<double>(value);
    };
    const auto of_half = [](uint16_t bits) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        const double sign = bits >> 15 ? -1 : 1;
        if (exponent == 31) {
            return fraction ? std::nan("") : sign * INFINITY;
        }
        return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
    };
    uint16_t half = 0;
    uint32_t word = 0;
    float single = 0;
    switch (dtype) {
    case DataType::BYTE:
    case DataType::BOOL:
    case DataType::U8:
        return as(uint8_t{});
    case DataType::I8:
        return as(int8_t{});
    case DataType::I16:
        return as(int16_t{});
    case DataType::U16:
        return as(uint16_t{});
    case DataType::I32:
        return as(int32_t{});
    case DataType::U32:
        return as(uint32_t{});
    case DataType::I64:
        return as(int64_t{});
    case DataType::U64:
        return as(uint64_t{});
    case DataType::F8: { // float8_e4m3fn
        const auto bits = static_cast<uint8_t>(data[0]);
        const int exponent = bits >> 3 & 15, fraction = bits & 7;
        const double sign = bits >> 7 ? -1 : 1;
        if ((bits & 127) == 127) {
            return std::nan("");
        }
        return sign * (exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9));
    }
    case DataType::F16:
        std::memcpy(&half, data, sizeof half);
        return of_half(half);
    case DataType::BF16:
        std::memcpy(&half, data, sizeof half);
        word = static_cast<uint32_t>(half) << 16;
        std::memcpy(&single, &word, sizeof single);
        return single;
    case DataType::F32:
        return as(float{});
    case DataType::F64:
        return as(double{});
    default:
        return std::nan("");
    }
}

void print(std::ostream &out, const std::byte *&data, const Shape &shape, size_t dim, DataType dtype) {
    if (dim == shape.size()) {
        DataType part = dtype;
        switch (dtype) {
        case DataType::C16:
            part = DataType::F8;
            break;
        case DataType::C32:
            part = DataType::F16;
            break;
        case DataType::C64:
            part = DataType::F32;
            break;
        case DataType::C128:
            part = DataType::F64;
            break;
        default:
            break;
        }
        out << number(data, part);
        if (part != dtype) {
            out << " + " << number(data + dsize(part), part) << "i";
        }
        data += dsize(dtype);
        return;
    }
    out << "[";
    for (Size i = 0; i < shape[dim]; ++i) {
        out << (i == 0 ? "" : dim + 1 == shape.size() ? ", " : ",\n" + std::string(dim + 1, ' '));
        print(out, data, shape, dim + 1, dtype);
    }
    out << "]";
}

} // namespace

void TensorImpl::copy_from(Tensor src) {
    Tensor dst = handle();
    if (src->shape() != shape() || src->dtype() != dtype()) {
        fail("infinicore::Tensor::copy_from: src must have the shape and dtype of the tensor (", info(), "), got ",
             src->info());
    }
    if (numel() == 0) {
        return;
    }
    if (src->device() == device()) {
        op::rearrange_(dst, src);
        return;
    }
    if (current_recording() == nullptr) {
        readable("copy_from", *src.operator->());
    }
    const Tensor packed = src->contiguous();
    if (is_contiguous()) {
        copy_bytes(dst, packed);
        return;
    }
    const Tensor received = Tensor::empty(shape(), dtype(), device());
    copy_bytes(received, packed);
    op::rearrange_(dst, received);
}

Tensor TensorImpl::to(Device target) const {
    if (target == device()) {
        return handle();
    }
    Tensor copy = Tensor::empty(shape(), dtype(), target);
    copy->copy_from(handle());
    return copy;
}

Tensor TensorImpl::contiguous() const {
    if (is_contiguous()) {
        return handle();
    }
    Tensor copy = Tensor::empty(shape(), dtype(), device());
    copy->copy_from(handle());
    return copy;
}

std::vector<std::byte> TensorImpl::bytes() const {
    readable("debug", *this);
    if (current_recording() != nullptr) {
        fail("infinicore::Tensor::debug: values cannot be read while a graph is recorded");
    }
    std::vector<std::byte> values(nbytes());
    if (!values.empty()) {
        const Tensor packed = contiguous();
        const DeviceScope scope(device());
        context::syncStream();
        check(infinirtMemcpy(values.data(), packed->data(), values.size(),
                             is_host(device()) ? INFINIRT_MEMCPY_H2H : INFINIRT_MEMCPY_D2H));
    }
    return values;
}

void TensorImpl::debug(const std::string &filename) const {
    const std::vector<std::byte> values = bytes();
    std::FILE *const file = std::fopen(filename.c_str(), "wb");
    const bool written = file != nullptr && std::fwrite(values.data(), 1, values.size(), file) == values.size();
    if ((file != nullptr && std::fclose(file) != 0) || !written) {
        fail("infinicore::Tensor::debug: filename must be of a file that can be written, got ", filename, " (",
             std::strerror(errno), ")");
    }
}

void TensorImpl::debug() const {
    const std::vector<std::byte> values = bytes();
    const std::byte *next = values.data();
    std::cout << info() << "\n";
    print(std::cout, next, shape(), 0, dtype());
    std::cout << std::endl;
}

} // namespace infinicore
