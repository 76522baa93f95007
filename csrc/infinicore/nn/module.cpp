// nn::Module: the names of parameters, and loading by them.
#include "infinicore/nn/module.hpp"

#include <mutex>

#include "../error.h"

namespace infinicore::nn {

namespace {

// Whether both map the same names to the same tensors.
bool same(const std::unordered_map<std::string, Parameter> &a, const std::unordered_map<std::string, Parameter> &b) {
    if (a.size() != b.size()) {
        return false;
    }
    for (const auto &[name, parameter] : a) {
        const auto found = b.find(name);
        if (found == b.end() || static_cast<bool>(parameter) != static_cast<bool>(found->second) ||
            (parameter && parameter.operator->() != found->second.operator->())) {
            return false;
        }
    }
    return true;
}

} // namespace

const std::unordered_map<std::string, Parameter> &Module::state_dict() const {
    std::unordered_map<std::string, Parameter> now;
    collect("", now);
    // Threads may ask for unchanging state at once. One lock serves all modules, since calls are rare.
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!same(now, state_dict_)) {
        state_dict_ = std::move(now);
    }
    return state_dict_;
}

void Module::collect(const std::string &prefix, std::unordered_map<std::string, Parameter> &found) const {
    for (const auto &[name, parameter] : parameters_) {
        found.emplace(prefix + name, parameter);
    }
    for (const auto &[name, submodule] : submodules_) {
        submodule->collect(prefix + name + ".", found);
    }
}

void Module::load_state_dict(const std::unordered_map<std::string, Tensor> &_state_dict) {
    for (const auto &[name, tensor] : _state_dict) {
        if (Parameter *const parameter = find(name)) {
            parameter->load("infinicore::nn::Module::load_state_dict: " + name, tensor, false);
        }
    }
}

void Module::load_parameter(const std::string &name, const Tensor &param) {
    const char *const function = "load_parameter";
    get(function, name).load(message("infinicore::nn::Module::", function, ": ", name), param, false);
}

void Module::load_parameter_(const std::string &name, const Tensor &param) {
    const char *const function = "load_parameter_";
    get(function, name).load(message("infinicore::nn::Module::", function, ": ", name), param, true);
}

void Module::load_parameter_from_blob(const std::string &name, const void *data) {
    const char *const function = "load_parameter_from_blob";
    get(function, name).load_blob(message("infinicore::nn::Module::", function, ": ", name), data);
}

Tensor Module::register_parameter(const std::string &name, Parameter param) {
    parameters_[name] = param;
    return param;
}

Tensor Module::register_buffer(const std::string &name, Parameter buffer) {
    buffers_[name] = buffer;
    return buffer;
}

void Module::add_submodule(const std::string &name, std::shared_ptr<Module> submodule) {
    if (submodule == nullptr) {
        fail("infinicore::nn::Module::add_module: submodule must be a module, got NULL for ", name);
    }
    submodules_[name] = std::move(submodule);
}

Parameter *Module::find(const std::string &name) {
    for (auto *const own : {&parameters_, &buffers_}) {
        const auto found = own->find(name);
        if (found != own->end()) {
            return &found->second;
        }
    }
    // Module names may contain dots ("layers.0"), so the end of a name is not known in advance.
    for (const auto &[prefix, submodule] : submodules_) {
        if (name.size() > prefix.size() && name[prefix.size()] == '.' && name.compare(0, prefix.size(), prefix) == 0) {
            if (Parameter *const parameter = submodule->find(name.substr(prefix.size() + 1))) {
                return parameter;
            }
        }
    }
    return nullptr;
}

Parameter &Module::get(const char *function, const std::string &name) {
    Parameter *const parameter = find(name);
    if (parameter == nullptr) {
        fail("infinicore::nn::Module::", function, ": name must be that of a parameter or buffer of the module, got \"",
             name, "\"");
    }
    return *parameter;
}

} // namespace infinicore::nn
