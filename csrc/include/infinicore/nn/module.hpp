// nn::Module: parameters, buffers and submodules by name, and how a checkpoint fills them. The macros at the end
// declare members of a module, called NAME_, and make and register them in its constructor.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../device.hpp"
#include "../tensor.hpp"
#include "parameter.hpp"

namespace infinicore::nn {

class Module {
public:
    Module() = default;
    virtual ~Module() = default;

    // The parameters of this module and its submodules, by dotted names: "layers.0.weight". Buffers are not included,
    // like PyTorch's non-persistent ones: a module computes its tables itself.
    // The reference is valid until the module is destroyed. Parameters that are registered later appear at the next
    // call of state_dict(); nothing else changes the map.
    const std::unordered_map<std::string, Parameter> &state_dict() const;

    // Loads the module's parameters; other names are ignored.
    void load_state_dict(const std::unordered_map<std::string, Tensor> &_state_dict);

    // Copies this rank's shard of the whole tensor into a parameter or a buffer (Parameter::load). Throws for an
    // unknown name.
    void load_parameter(const std::string &name, const Tensor &param);

    // The same, but also takes a tensor of the shard's shape, which is copied as it is.
    void load_parameter_(const std::string &name, const Tensor &param);

    // Parameter::load_blob.
    void load_parameter_from_blob(const std::string &name, const void *data);

protected:
    // A name may have dots, so that a module can present parts of a fused weight under a checkpoint's names.
    // Registering a name again replaces the earlier tensor.
    Tensor register_parameter(const std::string &name, Parameter param);
    Tensor register_buffer(const std::string &name, Parameter buffer);

    template <typename M> std::shared_ptr<M> add_module(const std::string &name, std::shared_ptr<M> submodule) {
        static_assert(std::is_base_of_v<Module, M>, "add_module takes a class derived from infinicore::nn::Module");
        add_submodule(name, submodule);
        return submodule;
    }

    template <typename M, typename... Args>
    std::shared_ptr<M> register_module(const std::string &name, Args &&...args) {
        return add_module(name, std::make_shared<M>(std::forward<Args>(args)...));
    }

    // name.0, name.1, ...; each is made from the same arguments.
    template <typename M, typename... Args>
    std::vector<std::shared_ptr<M>> register_modules(size_t count, const std::string &name, Args &&...args) {
        std::vector<std::shared_ptr<M>> modules;
        modules.reserve(count);
        for (size_t i = 0; i < count; ++i) {
            modules.push_back(register_module<M>(name + "." + std::to_string(i), args...));
        }
        return modules;
    }

    Device device_;
    std::unordered_map<std::string, std::shared_ptr<Module>> submodules_;
    std::unordered_map<std::string, Parameter> buffers_;
    std::unordered_map<std::string, Parameter> parameters_;

private:
    void add_submodule(const std::string &name, std::shared_ptr<Module> submodule);
    void collect(const std::string &prefix, std::unordered_map<std::string, Parameter> &found) const;
    Parameter *find(const std::string &name);
    Parameter &get(const char *function, const std::string &name);

    mutable std::unordered_map<std::string, Parameter> state_dict_; // what state_dict() returned last
};

} // namespace infinicore::nn

#define INFINICORE_NN_MODULE(ModuleType, name) std::shared_ptr<ModuleType> name##_
#define INFINICORE_NN_MODULE_VEC(ModuleType, name) std::vector<std::shared_ptr<ModuleType>> name##_
#define INFINICORE_NN_PARAMETER(name) infinicore::nn::Parameter name##_
#define INFINICORE_NN_BUFFER(name) infinicore::nn::Parameter name##_

#define INFINICORE_NN_MODULE_INIT(name, ...)                                                                           \
    name##_ = this->template register_module<typename decltype(name##_)::element_type>(#name, ##__VA_ARGS__)
#define INFINICORE_NN_MODULE_VEC_INIT(name, count, ModuleType, ...)                                                    \
    name##_ = this->template register_modules<ModuleType>(count, #name, ##__VA_ARGS__)
// `args` in parentheses: (shape, dtype, device[, tp_dim, tp_rank, tp_size]).
#define INFINICORE_NN_PARAMETER_INIT(name, args)                                                                       \
    this->register_parameter(#name, name##_ = infinicore::nn::Parameter args)
#define INFINICORE_NN_BUFFER_INIT(name, args) this->register_buffer(#name, name##_ = infinicore::nn::Parameter args)
