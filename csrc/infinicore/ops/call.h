// How ops call operators of libinfiniop. COperator holds an operator's four C functions; call() runs it on tensors, or
// notes the call while a graph is recorded. Prepared operators are cached by device, dtypes, shapes, strides and
// parameters.
#pragma once

#include <array>
#include <cstring>
#include <list>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../error.h"
#include "../recording.h"
#include "infinicore/context/context.hpp"
#include "infinicore/ops/common/dispatcher.hpp"
#include "infiniop.h"

namespace infinicore::op {

// One tensor of a call; nullptr for an optional tensor that is absent.
struct Argument {
    const char *name;
    const Tensor &tensor;
    enum Access { Read, Write, ReadWrite } access = Read;
    bool is_optional = false;
};

// Everything that selects a prepared operator, as words.
class Key {
public:
    void add(uint64_t word) {
        if (size_ < words_.size()) {
            words_[size_] = word;
        }
        ++size_;
    }
    template <typename Number> void add_number(Number number) {
        static_assert(sizeof number <= sizeof(uint64_t));
        uint64_t word = 0;
        std::memcpy(&word, &number, sizeof number);
        add(word);
    }
    void add(const TensorImpl &tensor) {
        add(static_cast<uint64_t>(tensor.dtype()) << 32 | tensor.ndim());
        for (size_t dim = 0; dim < tensor.ndim(); ++dim) {
            add(tensor.shape()[dim]);
            add(static_cast<uint64_t>(tensor.strides()[dim]));
        }
    }
    bool fits() const { return size_ <= words_.size(); }
    size_t hash() const {
        uint64_t mixed = size_;
        for (size_t i = 0; i < size_; ++i) {
            mixed = (mixed ^ words_[i]) * 0x9e3779b97f4a7c15u;
            mixed ^= mixed >> 29;
        }
        return mixed;
    }
    bool operator==(const Key &other) const {
        return size_ == other.size_ && std::memcmp(words_.data(), other.words_.data(), size_ * sizeof(uint64_t)) == 0;
    }

private:
    // enough for nine tensors of four dimensions, or five of eight; calls with larger keys are not cached
    std::array<uint64_t, 88> words_;
    size_t size_ = 0;
};

// A prepared operator; the destructor destroys its descriptor.
struct Prepared {
    InfiniopDescriptor *desc = nullptr;
    size_t workspace_size = 0;
    infiniStatus_t (*destroy)(InfiniopDescriptor *) = nullptr;

    Prepared() = default;
    Prepared(const Prepared &) = delete;
    ~Prepared() {
        if (desc != nullptr) {
            destroy(desc);
        }
    }
};

// A thread's prepared operators of one op, the last used first.
class OperatorCache {
public:
    static constexpr size_t kMost = 128; // entries per op and thread

    std::shared_ptr<Prepared> &find_or_make(const Key &key) {
        if (!entries_.empty() && entries_.front().first == key) {
            return entries_.front().second;
        }
        const size_t hash = key.hash();
        const auto range = index_.equal_range(hash);
        for (auto found = range.first; found != range.second; ++found) {
            if (found->second->first == key) {
                entries_.splice(entries_.begin(), entries_, found->second);
                return entries_.front().second;
            }
        }
        if (entries_.size() == kMost) {
            const auto last = std::prev(entries_.end());
            const auto old = index_.equal_range(last->first.hash());
            for (auto entry = old.first; entry != old.second; ++entry) {
                if (entry->second == last) {
                    index_.erase(entry);
                    break;
                }
            }
            entries_.pop_back();
        }
        entries_.emplace_front(key, nullptr);
        index_.emplace(hash, entries_.begin());
        return entries_.front().second;
    }

private:
    using Entry = std::pair<Key, std::shared_ptr<Prepared>>;
    std::list<Entry> entries_;
    std::unordered_multimap<size_t, std::list<Entry>::iterator> index_;
};

// A call as a graph stores it; fuse() reads these.
class RecordedCall : public graph::GraphOperator {
public:
    struct Tensors {
        const char *name;
        Tensor blob; // its address, without a reference to its memory
        Argument::Access access;
        bool is_of_pool;              // whether it lies in the graph's own memory
        std::weak_ptr<Memory> memory; // expired: only ops of the graph can read it
    };
    std::string name() const override { return op; }
    void set_address(size_t index, void *address) { data_.at(index) = address; }

    const char *op = "";
    std::vector<Tensors> tensors;
    std::vector<double> numbers; // the op's parameters, in its order

protected:
    std::shared_ptr<Prepared> prepared_;
    std::array<void *, 12> data_{};
};

// Returns the tensor for use before enter() has checked all arguments; throws, naming the argument, if it is empty.
const Tensor &present(const char *op, const char *name, const Tensor &tensor);
// Allocates a result on the device of an argument; throws first if the graph of another device is recorded.
Tensor new_result(const char *op, const char *name, const Tensor &argument, const Shape &shape, DataType dtype);
// The same with the argument's shape and dtype.
Tensor result_like(const char *op, const char *name, const Tensor &argument);
// Checks that all tensors exist, are on one device, and have values if they are read; makes that device current.
Device enter(const char *op, const Argument *arguments, size_t count);
// Adds a call to the recording.
void note(Recording &recording, std::shared_ptr<RecordedCall> call, const Argument *arguments, size_t count);

// `create`, `workspace_size` (nullptr: the operator has none), `run` and `destroy` are C functions of one operator, or
// functions of the same form: create(handle, &desc, tensor descriptors..., parameters of creation...), run(desc,
// workspace, size, addresses..., parameters of a run..., stream), with the tensors in the same order. The key must
// distinguish everything that create takes.
template <auto create, auto workspace_size, auto run, auto destroy> class COperator {
public:
    template <size_t count, typename... Created, typename... Ran>
    static void call(const char *op, const Argument (&arguments)[count], const std::tuple<Created...> &created = {},
                     const std::tuple<Ran...> &ran = {}) {
        const Device device = enter(op, arguments, count);
        std::shared_ptr<Prepared> &prepared = find(device, arguments, created, std::make_index_sequence<count>());
        Recording *const recording = current_recording();
        if (recording != nullptr) {
            auto call = std::make_shared<Noted<count, Ran...>>(op, prepared, ran);
            (std::apply([&](auto... number) { (call->numbers.push_back(static_cast<double>(number)), ...); }, created));
            (std::apply([&](auto... number) { (call->numbers.push_back(static_cast<double>(number)), ...); }, ran));
            note(*recording, std::move(call), arguments, count);
            return;
        }
        void *data[count];
        for (size_t i = 0; i < count; ++i) {
            data[i] = address(arguments[i].tensor);
        }
        if (prepared->workspace_size == 0) {
            launch(*prepared, nullptr, data, ran, std::make_index_sequence<count>());
        } else {
            const std::shared_ptr<Memory> workspace = context::allocateMemory(prepared->workspace_size);
            launch(*prepared, workspace->data(), data, ran, std::make_index_sequence<count>());
        }
    }

private:
    static void *address(const Tensor &tensor) { return tensor ? const_cast<std::byte *>(tensor->data()) : nullptr; }

    static infiniopTensorDescriptor_t descriptor(const Tensor &tensor) { return tensor ? tensor->desc() : nullptr; }

    template <size_t count, typename... Created, size_t... i>
    static std::shared_ptr<Prepared> &find(const Device &device, const Argument (&arguments)[count],
                                           const std::tuple<Created...> &created, std::index_sequence<i...>) {
        static thread_local OperatorCache cache;
        static thread_local std::shared_ptr<Prepared> unkept;
        Key key;
        key.add(static_cast<uint64_t>(device.getType()) << 32 | device.getIndex());
        for (const Argument &argument : arguments) {
            if (argument.tensor) {
                key.add(*argument.tensor.operator->());
            } else {
                key.add(0);
            }
        }
        std::apply([&](auto... number) { (key.add_number(number), ...); }, created);
        std::shared_ptr<Prepared> &entry = key.fits() ? cache.find_or_make(key) : unkept;
        if (entry == nullptr || !key.fits()) {
            auto fresh = std::make_shared<Prepared>();
            fresh->destroy = destroy;
            const auto make = [&](auto... number) {
                return create(context::getInfiniopHandle(device), &fresh->desc, descriptor(arguments[i].tensor)...,
                              number...);
            };
            check(std::apply(make, created));
            if constexpr (!std::is_null_pointer_v<decltype(workspace_size)>) {
                check(workspace_size(fresh->desc, &fresh->workspace_size));
            }
            entry = std::move(fresh);
        }
        return entry;
    }

    template <typename... Ran, size_t... i>
    static void launch(const Prepared &prepared, void *workspace, void *const *data, const std::tuple<Ran...> &ran,
                       std::index_sequence<i...>) {
        const Device device(static_cast<Device::Type>(prepared.desc->device_type),
                            static_cast<size_t>(prepared.desc->device_id));
        const infinirtStream_t stream = ThreadState::current()->launch_stream(device);
        const auto start = [&](auto... number) {
            if constexpr (std::is_null_pointer_v<decltype(workspace_size)>) {
                return run(prepared.desc, data[i]..., number..., stream);
            } else {
                return run(prepared.desc, workspace, prepared.workspace_size, data[i]..., number..., stream);
            }
        };
        check(std::apply(start, ran));
    }

    template <size_t count, typename... Ran> class Noted : public RecordedCall {
    public:
        Noted(const char *name, std::shared_ptr<Prepared> prepared, const std::tuple<Ran...> &ran) : ran_(ran) {
            op = name;
            prepared_ = std::move(prepared);
            if (prepared_->workspace_size > 0) { // returns to the recording's pool at once, for the next op's workspace
                address_ = context::allocateMemory(prepared_->workspace_size)->data();
            }
        }
        void run() const override {
            launch(*prepared_, address_, data_.data(), ran_, std::make_index_sequence<count>());
        }

    private:
        const std::tuple<Ran...> ran_;
        void *address_ = nullptr;
    };
};

// Calls the function registered for the device of `first`. Our function notes itself while a graph is recorded; another
// function is noted as a host function.
template <typename Type> struct As { // keeps an argument from deducing Arguments
    using type = Type;
};
template <typename... Arguments>
void dispatch(const common::OpDispatcher<void (*)(Arguments...)> &dispatcher, void (*ours)(Arguments...),
              const char *name, const Tensor &first, typename As<Arguments>::type &&...arguments) {
    // Without a first argument there is no device; our function then throws and names the argument.
    void (*const function)(Arguments...) = first ? dispatcher.lookup(first->device().getType()) : ours;
    if (function == ours || current_recording() == nullptr) {
        function(std::forward<Arguments>(arguments)...);
    } else {
        context::setDevice(first->device());
        context::addGraphOperator(std::make_shared<graph::HostOperator>(
            [function, kept = std::tuple<std::decay_t<Arguments>...>(arguments...)]() mutable {
                std::apply(function, kept);
            },
            name));
    }
}

} // namespace infinicore::op
