// Tensors of infinicore::: making, views, copies between layouts and devices, printing; and what is refused.
// Usage: test_tensor [CPU | NVIDIA] FOLDER, the folder for files that are written.
#include <infinicore.hpp>

#include <cstring>
#include <fstream>
#include <numeric>
#include <vector>

#include "check.h"
#include "device.h"

using namespace infinicore;

namespace {

// 0, 1, 2, ... in a shape, on the device.
Tensor counted(const Shape &shape, const Device &device) {
    Tensor host = Tensor::empty(shape, DataType::F32, Device::cpu());
    for (size_t i = 0; i < host->numel(); ++i) {
        reinterpret_cast<float *>(host->data())[i] = static_cast<float>(i);
    }
    return host->to(device);
}

// The elements in order, on the host.
std::vector<float> values(const Tensor &tensor) {
    const Tensor host = tensor->contiguous()->to(Device::cpu());
    const auto *const data = reinterpret_cast<const float *>(host->data());
    return std::vector<float>(data, data + host->numel());
}

void making(const Device &device) {
    const Tensor tensor = Tensor::empty({2, 3, 4}, DataType::BF16, device);
    CHECK(tensor && tensor->ndim() == 3 && tensor->numel() == 24 && tensor->nbytes() == 48);
    CHECK(tensor->shape() == (Shape{2, 3, 4}) && tensor->strides() == (Strides{12, 4, 1}));
    CHECK(tensor->size(1) == 3 && tensor->stride(0) == 12 && tensor->element_size() == 2);
    CHECK(tensor->dtype() == DataType::BF16 && tensor->device() == device && !tensor->is_pinned());
    CHECK(tensor->is_contiguous() && context::getDevice() == device);
    CHECK(!Tensor());
    CHECK(Tensor::empty({}, DataType::F32, device)->numel() == 1);
    CHECK(Tensor::empty({0, 5}, DataType::F32, device)->numel() == 0);
    CHECK(Tensor::empty({4}, DataType::F32, Device::cpu(), true)->is_pinned());
    const Tensor strided = Tensor::strided_empty({2, 2}, {1, 5}, DataType::F64, device);
    CHECK(strided->memory()->size() == 7 * 8 && !strided->is_contiguous());

    for (const DataType dtype :
         {DataType::BYTE, DataType::BOOL, DataType::I8, DataType::I16, DataType::I32, DataType::I64, DataType::U8,
          DataType::U16, DataType::U32, DataType::U64, DataType::F8, DataType::F16, DataType::F32, DataType::F64,
          DataType::C16, DataType::C32, DataType::C64, DataType::C128, DataType::BF16}) {
        const Tensor zeros = Tensor::zeros({3, 2}, dtype, device)->to(Device::cpu());
        for (size_t i = 0; i < zeros->nbytes(); ++i) {
            CHECK(zeros->data()[i] == std::byte{0});
        }
        const Tensor ones = Tensor::ones({3, 2}, dtype, device)->to(Device::cpu());
        CHECK(std::memcmp(ones->data(), ones->data() + dsize(dtype), dsize(dtype) * 5) == 0);
        CHECK(std::memcmp(ones->data(), zeros->data(), dsize(dtype)) != 0);
    }
    const Tensor complex = Tensor::ones({2}, DataType::C64, device)->to(Device::cpu());
    const auto *const parts = reinterpret_cast<const float *>(complex->data());
    CHECK(parts[0] == 1 && parts[1] == 0 && parts[2] == 1 && parts[3] == 0);
    CHECK(values(op::ones()) == std::vector<float>{1});

    THROWS(Tensor()->shape(), "infinicore::Tensor: an empty tensor has no members");
    THROWS(Tensor::strided_empty({2, 2}, {1}, DataType::F32, device),
           "infinicore::Tensor::strided_empty: strides must have one number for each of the 2 dimensions, got [1]");
    THROWS(Tensor::strided_empty({2}, {-1}, DataType::F32, device),
           "infinicore::Tensor::strided_empty: strides must be at least 0, got [-1]");
    THROWS(Tensor::empty({size_t{1} << 62, 8}, DataType::F32, device),
           "infinicore::Tensor::empty: shape must describe less than 2^63 bytes, got [4611686018427387904, 8]");
    THROWS(Tensor::empty({1}, static_cast<DataType>(77), device),
           "infinicore::Tensor: dtype must be one of DataType's, got 77");
    THROWS(tensor->size(3), "infinicore::Tensor::size: dim must be below 3, got 3");
    THROWS(tensor->stride(7), "infinicore::Tensor::stride: dim must be below 3, got 7");
}

void views(const Device &device) {
    const Tensor tensor = counted({2, 3, 4}, device);
    const Tensor part = tensor->narrow({{1, 1, 2}, {2, 2, 2}});
    CHECK(part->shape() == (Shape{2, 2, 2}) && values(part) == (std::vector<float>{6, 7, 10, 11, 18, 19, 22, 23}));
    CHECK(part->memory() == tensor->memory());
    const Tensor turned = tensor->permute({2, 0, 1});
    CHECK(turned->shape() == (Shape{4, 2, 3}) && turned->strides() == (Strides{1, 12, 4}));
    CHECK(values(turned->narrow({{0, 1, 1}})) == (std::vector<float>{1, 5, 9, 13, 17, 21}));
    const Tensor one = tensor->unsqueeze(1);
    CHECK(one->shape() == (Shape{2, 1, 3, 4}) && one->stride(1) == 0 && !one->is_contiguous());
    CHECK(one->squeeze(1)->is_contiguous() && one->view({6, 4})->shape() == (Shape{6, 4}));
    CHECK(tensor->view({24})->stride(0) == 1 && values(tensor->view({4, 6})) == values(tensor));
    CHECK(tensor->narrow({{2, 0, 2}})->view({6, 2})->strides() == (Strides{4, 1}));
    CHECK(turned->view({2, 2, 2, 3})->strides() == (Strides{2, 1, 12, 4}));
    CHECK(Tensor::ones({1}, DataType::F32, device)->view({})->ndim() == 0);
    CHECK(Tensor::empty({0, 4}, DataType::F32, device)->view({2, 0})->numel() == 0);
    CHECK(values(tensor->as_strided({2, 2}, {13, 0})) == (std::vector<float>{0, 0, 13, 13}));
    CHECK(tensor->contiguous()->data() == tensor->data() && turned->contiguous()->is_contiguous());
    CHECK(tensor->to(device)->data() == tensor->data());
    CHECK(tensor->to_blob()->data() == tensor->data() && tensor->to_blob()->memory() != tensor->memory());

    THROWS(tensor->squeeze(0),
           "infinicore::Tensor::squeeze: dim must be that of a dimension of 1 of shape [2, 3, 4], got 0");
    THROWS(tensor->unsqueeze(4), "infinicore::Tensor::unsqueeze: dim must be at most 3, got 4");
    THROWS(tensor->narrow({{1, 2, 2}}),
           "infinicore::Tensor::narrow: start + length must be at most 3, the size of dimension 1, got 2 + 2");
    THROWS(tensor->narrow({{1, 1, SIZE_MAX}}),
           "infinicore::Tensor::narrow: start + length must be at most 3, the size of "
           "dimension 1, got 1 + 18446744073709551615");
    THROWS(tensor->narrow({{3, 0, 1}}), "infinicore::Tensor::narrow: dim must be below 3, got 3");
    THROWS(tensor->permute({0, 1, 1}),
           "infinicore::Tensor::permute: order must name each of the 3 dimensions once, got [0, 1, 1]");
    THROWS(tensor->view({5, 5}),
           "infinicore::Tensor::view: the new shape must have 24 elements as [2, 3, 4] has, got [5, 5]");
    THROWS(turned->view({24}), "infinicore::Tensor::view: a tensor of shape [4, 2, 3] and strides [1, 12, 4] cannot be "
                               "seen as [24] without a copy: use contiguous()");
    THROWS(tensor->as_strided({25}, {1}),
           "infinicore::Tensor::as_strided: shape [25] and strides [1] must stay inside of "
           "the tensor's memory of 96 bytes");
}

void copies(const Device &device) {
    const Tensor source = counted({3, 4}, device);
    const Tensor target = Tensor::strided_empty({3, 4}, {1, 3}, DataType::F32, device);
    Tensor(target)->copy_from(source);
    CHECK(values(target) == values(source));
    Tensor host = Tensor::strided_empty({4, 3}, {7, 2}, DataType::F32, Device::cpu());
    host->copy_from(source->permute({1, 0})); // strided to strided, from the device
    CHECK(values(host) == values(source->permute({1, 0})));
    Tensor back = Tensor::empty({4, 3}, DataType::F32, device);
    back->copy_from(host);
    CHECK(values(back) == values(host));
    Tensor empty = Tensor::empty({0}, DataType::F32, device);
    empty->copy_from(Tensor::empty({0}, DataType::F32, Device::cpu()));
    const std::string name = device.toString();
    THROWS(
        back->copy_from(source),
        "infinicore::Tensor::copy_from: src must have the shape and dtype of the tensor (Tensor: shape [4, 3], strides "
        "[3, 1], dtype float32, device " +
            name + "), got Tensor: shape [3, 4], strides [4, 1], dtype float32, device " + name);

    std::vector<float> memory(6);
    std::iota(memory.begin(), memory.end(), 0.0f);
    const Tensor blob = Tensor::from_blob(memory.data(), {2, 3}, DataType::F32, Device::cpu());
    memory[4] = 40;
    CHECK(values(blob) == memory && !blob->memory()->is_owned());
    const Tensor strided = Tensor::strided_from_blob(memory.data(), {3, 2}, {1, 3}, DataType::F32, Device::cpu());
    CHECK(values(strided) == (std::vector<float>{0, 3, 1, 40, 2, 5}));
    CHECK(strided->as_strided({6}, {1})->numel() == 6); // the caller's memory, the caller's affair
    THROWS(Tensor::from_blob(nullptr, {2}, DataType::F32, Device::cpu()),
           "infinicore::Tensor::from_blob: raw_ptr must not be NULL for a tensor of shape [2]");
}

void printing(const Device &device, const std::string &folder) {
    const Tensor tensor = counted({2, 2}, device)->permute({1, 0});
    CHECK(tensor->info() == "Tensor: shape [2, 2], strides [1, 2], dtype float32, device " + device.toString());
    const std::string path = folder + "/tensor.bin";
    tensor->debug(path);
    std::ifstream file(path, std::ios::binary);
    std::vector<float> read(4);
    file.read(reinterpret_cast<char *>(read.data()), 16);
    CHECK(file && read == (std::vector<float>{0, 2, 1, 3}));
    THROWS(tensor->debug(folder + "/none/tensor.bin"),
           "infinicore::Tensor::debug: filename must be of a file that can be written, got " + folder +
               "/none/tensor.bin (No such file or directory)");
    CHECK(Device(Device::Type::NVIDIA, 2).toString() == "NVIDIA:2" && toString(DataType::C32) == "complex32");
    CHECK(dsize(DataType::C128) == 16 && Device() == Device::cpu() && Device() != Device(Device::Type::QY));
}

// What ops refuse before libinfiniop sees it, and its own sentences.
void refusals(const Device &device) {
    const Tensor a = Tensor::ones({2, 4}, DataType::F32, device);
    THROWS(op::add_(a, a, Tensor()), "infinicore::add: b must be a tensor, got an empty one");
    bool has_thrown = false;
    try {
        op::add(a, Tensor::ones({2, 5}, DataType::F32, device));
    } catch (const std::runtime_error &error) {
        has_thrown = std::strstr(error.what(), "[2, 5]") != nullptr;
    }
    CHECK(has_thrown);
    THROWS(op::attention(a, a, a, a, a, 0),
           "infinicore::attention: q must have 3 dimensions [heads, seq, dim], got " + a->info());
    THROWS(op::matmul(a, Tensor::ones({4}, DataType::F32, device)),
           "infinicore::matmul: a and b must have at least 2 dimensions, got " + a->info() + " and " +
               Tensor::ones({4}, DataType::F32, device)->info());
    THROWS(context::setDevice(Device(device.getType(), 99)), context_sentence(device));
    if (device != Device::cpu()) {
        THROWS(op::add(a, Tensor::ones({2, 4}, DataType::F32, Device::cpu())),
               "infinicore::add: b must be on " + device.toString() + " as c is, got CPU:0");
    }
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    CHECK_RUNS("making", making(device));
    CHECK_RUNS("views", views(device));
    CHECK_RUNS("copies", copies(device));
    CHECK_RUNS("printing", printing(device, arguments[2]));
    CHECK_RUNS("refusals", refusals(device));
    return failures() != 0;
}
