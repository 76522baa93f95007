// AutogradChecked wraps the call of every registered function, for ops without a derivative. No gradient is lost
// silently: backward through a result raises; writing forms and forward mode raise at the call. Writes bump version
// counters and raise for inference tensors outside inference mode. Costs two loads per tensor if nothing requires a
// gradient.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include <torch/csrc/stable/tensor.h>

namespace infini {

using torch::stable::Tensor;

// What torch called: a registered function, whatever its type.
struct RegisteredCall {
    const char *name = ""; // "rms_norm.out"
    void (*function)() = nullptr;
    bool on_cuda = false;
};

// This thread's current or last one.
inline thread_local RegisteredCall current_call;

// Returns "rms_norm" for "rms_norm.out" and "rms_norm_": the op's name in messages.
std::string op_of(const char *registered);

// The name that a function is registered as; set by the registration.
template <auto function> inline const char *registered_name = nullptr;

// Whether torch would record a gradient for this tensor: it requires one, and grad mode is on.
bool is_followed(const Tensor &tensor);
// Throws if the tensor has a forward-mode tangent, which the kernel would drop.
void refuse_tangent(const char *op, int index, const Tensor &tensor);
[[noreturn]] void refuse_gradient(const char *op, int index);
// Counts a write, unless calls are being recorded. Throws for an inference tensor outside inference mode.
void count_write(const Tensor &tensor);
// y with a backward function that raises if a gradient for x is asked for; y itself if its dtype has no gradients.
Tensor without_backward(const char *op, const Tensor &y, const Tensor &x);

// Calls of functions with such arguments. Those of type Tensor are written, those of type const Tensor & are read.
template <typename Result, typename... Arguments> struct AutogradChecked {
    // run(arguments...) for the op registered as `name`
    template <typename Run> static Result call(const char *name, const Run &run, Arguments &&...arguments) {
        int index = 0;
        bool followed = false;
        (check(name, ++index, followed, arguments), ...);
        if constexpr (kWrites) {
            (count<Arguments>(arguments), ...);
            return run(static_cast<Arguments &&>(arguments)...);
        } else {
            Result result = run(Arguments(arguments)...);
            if (followed) {
                (attach(name, result, arguments), ...);
            }
            return result;
        }
    }

private:
    static constexpr bool kWrites = (std::is_same_v<Arguments, Tensor> || ...);
    static_assert(kWrites || !std::is_void_v<Result>, "what an op writes is a parameter of type Tensor");

    template <typename Argument>
    static void check(const char *name, int index, bool &followed, const Argument &argument) {
        if constexpr (std::is_same_v<Argument, Tensor>) {
            refuse_tangent(name, index, argument);
            if (is_followed(argument)) {
                if constexpr (kWrites) {
                    refuse_gradient(name, index);
                }
                followed = true;
            }
        } else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
            if (argument) {
                check(name, index, followed, *argument);
            }
        }
    }

    template <typename Argument> static void count(const std::decay_t<Argument> &argument) {
        if constexpr (std::is_same_v<Argument, Tensor>) {
            count_write(argument);
        }
    }

    template <typename Output, typename Argument>
    static void attach(const char *name, Output &result, const Argument &argument) {
        if constexpr (std::is_same_v<Argument, Tensor>) {
            if (is_followed(argument)) {
                attach_to_each(name, result, argument);
            }
        } else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
            if (argument) {
                attach(name, result, *argument);
            }
        }
    }
    static void attach_to_each(const char *name, Tensor &y, const Tensor &x) { y = without_backward(name, y, x); }
    template <typename... Tensors>
    static void attach_to_each(const char *name, std::tuple<Tensors...> &results, const Tensor &x) {
        std::apply([&](auto &...ys) { (attach_to_each(name, ys, x), ...); }, results);
    }
};

} // namespace infini
