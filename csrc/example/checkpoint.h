// How the example llama.cpp reads a folder of Hugging Face: single values of config.json, tensors of model.safetensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include <infinicore.hpp>

using infinicore::DataType;
using infinicore::Device;
using infinicore::Shape;
using infinicore::Tensor;

inline std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + path);
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

// The first value of a key in JSON, as it is written: a word, or a list with its brackets. "" where there is none.
inline std::string value_of(const std::string &json, const std::string &key, size_t from = 0) {
    const std::string quoted = "\"" + key + "\":";
    const size_t at = json.find(quoted, from);
    if (at == std::string::npos) {
        return "";
    }
    const size_t begin = json.find_first_not_of(' ', at + quoted.size());
    return json.substr(begin, json.find_first_of(json[begin] == '[' ? "]" : ",}\n", begin) - begin);
}

// A file of tensors: the length of a header, the header {"NAME":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
// ...}, and the tensors' bytes.
class Safetensors {
public:
    explicit Safetensors(const std::string &path) : bytes_(read_file(path)) {
        uint64_t length = 0;
        std::memcpy(&length, bytes_.data(), std::min(bytes_.size(), sizeof length));
        if (bytes_.size() < sizeof length || length > bytes_.size() - sizeof length) {
            throw std::runtime_error(path + " is no safetensors file");
        }
        header_ = bytes_.substr(sizeof length, length);
        begin_ = sizeof length + length;
    }

    Tensor tensor(const std::string &name) { // in this object's memory; empty where the file has none of the name
        static const std::map<std::string, DataType> dtypes{
            {"\"F32\"", DataType::F32}, {"\"BF16\"", DataType::BF16}, {"\"F16\"", DataType::F16}};
        const size_t entry = header_.find("\"" + name + "\":");
        if (entry == std::string::npos) {
            return {};
        }
        const Shape shape = list(value_of(header_, "shape", entry)),
                    range = list(value_of(header_, "data_offsets", entry));
        const auto dtype = dtypes.find(value_of(header_, "dtype", entry));
        if (dtype == dtypes.end() || range.size() != 2 || range[1] > bytes_.size() - begin_) {
            throw std::runtime_error(name + " is not of F32, BF16 or F16, or beyond the end of the file");
        }
        return Tensor::from_blob(bytes_.data() + begin_ + range[0], shape, dtype->second, Device::cpu());
    }

private:
    static Shape list(const std::string &text) { // of "[2,3"
        Shape numbers;
        for (size_t at = 0; at < text.size() && text.size() > 1; at = std::min(text.find(',', at), text.size())) {
            numbers.push_back(std::stoull(text.substr(++at)));
        }
        return numbers;
    }

    std::string bytes_, header_;
    size_t begin_ = 0;
};
