// Tests infinicore::nn: names, loading, shards, the modules' results, all recorded too.
// Products are of small whole numbers, which are exact in any order of sums.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include <infinicore.hpp>

#include "check.h"
#include "device.h"

using namespace infinicore;

namespace {

Device device;

using Floats = std::vector<float>;

Floats whole_numbers(size_t count, unsigned seed) { // from -4 to 4
    Floats values(count);
    for (float &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int>(seed >> 16) % 9 - 4);
    }
    return values;
}

Size count_of(const Shape &shape) {
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
    return made;
}

Tensor floats(const Floats &values, const Shape &shape, Device on = device) {
    return tensor(values, shape, DataType::F32, on);
}

template <typename T> std::vector<T> elements(const Tensor &from) {
    const Tensor host = from->contiguous()->to(Device::cpu());
    std::vector<T> values(host->numel());
    if (!values.empty()) {
        std::memcpy(values.data(), host->data(), host->nbytes());
    }
    return values;
}

Floats values_of(const Tensor &from) {
    return elements<float>(from);
}

float of_half(uint16_t bits, DataType dtype) {
    if (dtype == DataType::BF16) {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float value = 0;
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent ? std::ldexp(1024.f + static_cast<float>(fraction), exponent - 25)
                                     : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -magnitude : magnitude;
}

// x [rows, in] times the transpose of w [out, in], of its columns from `from` to `to`, + bias.
Floats product(const Floats &x, const Floats &w, const Floats &bias, size_t in, size_t out, size_t from, size_t to) {
    Floats y;
    for (size_t row = 0; row < x.size() / in; ++row) {
        for (size_t column = 0; column < out; ++column) {
            float sum = bias.empty() ? 0 : bias[column];
            for (size_t i = from; i < to; ++i) {
                sum += x[row * in + i] * w[column * in + i];
            }
            y.push_back(sum);
        }
    }
    return y;
}

// ---- names and loading ----

class Leaf : public nn::Module {
public:
    explicit Leaf(size_t n) {
        device_ = device;
        INFINICORE_NN_PARAMETER_INIT(weight, ({n, 2}, DataType::F32, device));
        INFINICORE_NN_BUFFER_INIT(table, ({n}, DataType::F32, device));
        weight_->copy_from(Tensor::zeros({n, 2}, DataType::F32, device));
        table_->copy_from(Tensor::zeros({n}, DataType::F32, device));
    }
    void replace_weight() { INFINICORE_NN_PARAMETER_INIT(weight, ({4, 2}, DataType::F32, device)); }
    INFINICORE_NN_PARAMETER(weight);
    INFINICORE_NN_BUFFER(table);
};

class Tree : public nn::Module {
public:
    explicit Tree(size_t leaves) {
        INFINICORE_NN_MODULE_INIT(leaf, 1u);
        INFINICORE_NN_MODULE_VEC_INIT(leaves, leaves, Leaf, 3u);
        odd_ = register_module<Leaf>("a.b", 2u);
        INFINICORE_NN_PARAMETER_INIT(scale, ({}, DataType::F32, device));
        // Parts of one weight under names of a checkpoint.
        fused_ = Tensor::zeros({5, 4}, DataType::F32, device);
        first_ = register_parameter("first.weight", nn::Parameter(fused_->narrow({{0, 0, 2}})));
        register_parameter("second.weight", nn::Parameter(fused_->narrow({{0, 2, 3}})));
    }
    void add_nothing() { add_module("nothing", std::shared_ptr<Leaf>()); }
    void add_twig() { register_module<Leaf>("twig", 1u); }

    INFINICORE_NN_MODULE(Leaf, leaf);
    INFINICORE_NN_MODULE_VEC(Leaf, leaves);
    INFINICORE_NN_PARAMETER(scale);
    std::shared_ptr<Leaf> odd_;
    Tensor fused_, first_;
};

struct Forest : nn::Module {
    Forest() { INFINICORE_NN_MODULE_INIT(tree, 2u); }
    INFINICORE_NN_MODULE(Tree, tree);
};

std::set<std::string> names_of(const nn::Module &module) {
    std::set<std::string> names;
    for (const auto &[name, parameter] : module.state_dict()) {
        names.insert(name);
    }
    return names;
}

void test_names() {
    Tree tree(2);
    std::set<std::string> names{
        "leaf.weight", "leaves.0.weight", "leaves.1.weight", "a.b.weight", "first.weight", "second.weight", "scale"};
    CHECK(names_of(tree) == names);
    const auto &before = tree.state_dict();
    const nn::Parameter *const parameter = &before.at("leaf.weight");
    const auto &after = tree.state_dict();
    CHECK(&after == &before && &after.at("leaf.weight") == parameter);
    tree.add_twig();
    names.insert("twig.weight");
    CHECK(names_of(tree) == names && &tree.state_dict() == &before);
    CHECK(names_of(Tree(0)).size() == 5);
    tree.leaf_->replace_weight();
    CHECK(tree.state_dict().at("leaf.weight")->data() == tree.leaf_->weight_->data());
    const Forest forest;
    CHECK(forest.state_dict().count("tree.leaves.1.weight") == 1 && forest.state_dict().size() == 7);
    THROWS(tree.add_nothing(), "infinicore::nn::Module::add_module: submodule must be a module, got NULL for nothing");
}

void test_loading() {
    Tree tree(2);
    const Floats six{1, 2, 3, 4, 5, 6};
    tree.load_parameter("leaves.1.weight", floats(six, {3, 2}));
    CHECK(values_of(tree.leaves_[1]->weight_) == six); // the member and the registered one are the same
    CHECK(values_of(tree.leaves_[0]->weight_) == Floats(6));
    CHECK(values_of(tree.state_dict().at("leaves.1.weight")) == six);
    // Other layouts, from the host.
    tree.load_parameter("leaves.0.weight", floats({1, 3, 5, 2, 4, 6}, {2, 3}, Device::cpu())->permute({1, 0}));
    CHECK(values_of(tree.leaves_[0]->weight_) == six);
    tree.load_parameter("leaves.0.table", floats({7, 8, 9}, {3})); // a buffer
    CHECK(values_of(tree.leaves_[0]->table_) == (Floats{7, 8, 9}));
    tree.load_parameter("scale", floats({0.5f}, {}));
    CHECK(values_of(tree.scale_) == Floats{0.5f});
    tree.load_parameter("a.b.weight", floats({1, 2, 3, 4}, {2, 2}));
    CHECK(values_of(tree.odd_->weight_) == (Floats{1, 2, 3, 4}));
    tree.load_parameter_from_blob("leaf.weight", six.data());
    CHECK(values_of(tree.leaf_->weight_) == (Floats{1, 2}));

    tree.load_state_dict({{"first.weight", floats(Floats(8, 1.f), {2, 4})},
                          {"second.weight", floats(Floats(12, 2.f), {3, 4})},
                          {"third.weight", floats({3}, {1})},
                          {"leaves.2.weight", floats(six, {3, 2})}});
    Floats fused(8, 1.f);
    fused.resize(20, 2.f);
    CHECK(values_of(tree.fused_) == fused && values_of(tree.first_) == Floats(8, 1.f));

    const std::string nn = "infinicore::nn::",
                      none = ": name must be that of a parameter or buffer of the module, got ";
    for (const char *const name :
         {"", "leaf", "leaf.", ".weight", "leaf.weights", "leaves.2.weight", "leaf.weight.x", "leaf_weight"}) {
        THROWS(tree.load_parameter(name, floats({1}, {1})), nn + "Module::load_parameter" + none + "\"" + name + "\"");
    }
    THROWS(tree.load_parameter_("x", floats({1}, {1})), nn + "Module::load_parameter_" + none + "\"x\"");
    THROWS(tree.load_parameter_from_blob("x", six.data()), nn + "Module::load_parameter_from_blob" + none + "\"x\"");
    THROWS(tree.load_parameter_from_blob("leaf.weight", nullptr),
           nn + "Module::load_parameter_from_blob: leaf.weight must be loaded from an address, got NULL");
    THROWS(tree.load_parameter("leaves.0.weight", floats(six, {2, 3})),
           nn + "Module::load_parameter: leaves.0.weight must be loaded from shape [3, 2], got [2, 3]");
    THROWS(tree.load_state_dict({{"leaf.weight", floats({1, 2}, {2})}}),
           nn + "Module::load_state_dict: leaf.weight must be loaded from shape [1, 2], got [2]");
    THROWS(tree.load_parameter("leaf.weight", tensor<double>({1, 2}, {1, 2}, DataType::F64)),
           nn + "Module::load_parameter: leaf.weight must be loaded from " + toString(DataType::F32) + ", got " +
               toString(DataType::F64));
    THROWS(tree.load_parameter("leaf.weight", Tensor()),
           nn + "Module::load_parameter: leaf.weight must be loaded from a tensor, got an empty one");
    const Tensor two = floats({1, 2}, {1, 2});
    context::setDevice(device);
    context::startGraphRecording();
    THROWS(tree.load_parameter("leaf.weight", two),
           nn + "Module::load_parameter: leaf.weight must not be loaded while a graph is recorded");
    context::stopGraphRecording();
    CHECK(values_of(tree.leaf_->weight_) == (Floats{1, 2}));
}

// ---- shards ----

void test_shards() {
    const Shape shape{6, 3, 12};
    const Floats all = whole_numbers(count_of(shape), 5);
    for (Size dim = 0; dim < 3; ++dim) {
        for (Size size : {1, 3}) {
            for (Size rank = 0; rank < size; ++rank) {
                Shape part = shape;
                part[dim] /= size;
                const Tensor whole = floats(all, shape, Device::cpu());
                const Floats expected = values_of(whole->narrow({{dim, rank * part[dim], part[dim]}}));
                nn::Parameter parameter(shape, DataType::F32, device, dim, rank, size);
                CHECK(parameter->shape() == part && parameter->device() == device);
                parameter.load(whole);
                CHECK(values_of(parameter) == expected);
                nn::Parameter again(shape, DataType::F32, device, dim, rank, size);
                again.load_blob(all.data());
                CHECK(values_of(again) == expected);
                // A shard that is a view: what lies around it stays.
                const Tensor around = Tensor::zeros({part[0], part[1], part[2] + 2}, DataType::F32, device);
                nn::Parameter view(around->narrow({{2, 1, part[2]}}), dim, rank, size);
                view.load(whole->to(device));
                CHECK(values_of(view) == expected);
                CHECK(values_of(around->narrow({{2, 0, 1}})) == Floats(part[0] * part[1]));
                CHECK(values_of(around->narrow({{2, part[2] + 1, 1}})) == Floats(part[0] * part[1]));
            }
        }
    }
    const std::string name = "infinicore::nn::Parameter: ";
    THROWS(nn::Parameter(shape, DataType::F32, device, 0, 2, 2), name + "tp_rank must be below tp_size, got 2 of 2");
    THROWS(nn::Parameter(shape, DataType::F32, device, 0, 0, 0), name + "tp_rank must be below tp_size, got 0 of 0");
    THROWS(nn::Parameter(shape, DataType::F32, device, 3, 0, 2),
           name + "tp_dim must be one of the 3 dimensions of shape [6, 3, 12], got 3");
    THROWS(nn::Parameter(shape, DataType::F32, device, 1, 0, 2),
           name + "tp_size must divide dimension 1 of shape [6, 3, 12], got 2");
    THROWS(nn::Parameter(floats({1}, {1}), 1, 0, 2),
           name + "tp_dim must be one of the 1 dimensions of shape [1], got 1");
    nn::Parameter shard({4, 2}, DataType::F32, device, 0, 1, 2);
    THROWS(shard.load(floats({1, 2, 3, 4}, {2, 2})),
           name.substr(0, name.size() - 2) +
               "::load: the parameter must be loaded from shape [4, 2], which is split over 2 "
               "ranks in dimension 0, got [2, 2]");
    THROWS(nn::Parameter().load(floats({1}, {1})),
           "infinicore::nn::Parameter::load: the parameter must have a tensor to load into, and is empty");
    THROWS(nn::Parameter().load_blob(&shape),
           "infinicore::nn::Parameter::load_blob: the parameter must have a tensor to load into, and is empty");

    // load_parameter_ takes the shard itself, too.
    nn::ColumnParallelLinear linear(2, 4, false, DataType::F32, device, 1, 2);
    linear.load_parameter_("weight", floats({1, 2, 3, 4}, {2, 2}));
    CHECK(values_of(linear.weight()) == (Floats{1, 2, 3, 4}));
    linear.load_parameter_("weight", floats({1, 2, 3, 4, 5, 6, 7, 8}, {4, 2}));
    CHECK(values_of(linear.weight()) == (Floats{5, 6, 7, 8}));
    nn::Parameter empty({0, 4}, DataType::F32, device, 1, 1, 2);
    empty.load_blob(nullptr);
    CHECK(empty->numel() == 0);
}

// ---- linear ----

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

void test_linear() {
    for (const bool has_bias : {true, false}) {
        for (const auto &[in, out] : {std::pair<size_t, size_t>{33, 7}, {1, 1}, {64, 96}}) {
            const Floats w = whole_numbers(in * out, 1), b = has_bias ? whole_numbers(out, 2) : Floats();
            nn::Linear linear(in, out, has_bias, DataType::F32, device);
            CHECK(linear.in_features() == in && linear.out_features() == out && linear.has_bias() == has_bias);
            CHECK(linear.dtype() == DataType::F32 && static_cast<bool>(linear.bias()) == has_bias);
            linear.load_parameter("weight", floats(w, {out, in}));
            if (has_bias) {
                linear.load_parameter("bias", floats(b, {out}));
            }
            const auto expected = [&, in = in, out = out](const Floats &x) { return product(x, w, b, in, out, 0, in); };
            both_ways([&](Tensor &x) { return linear.forward(x); }, whole_numbers(3 * in, 3), {3, in}, expected);
            both_ways([&](Tensor &x) { return linear.forward(x); }, whole_numbers(6 * in, 3), {2, 3, in}, expected);
            Tensor residual = floats(Floats(3 * out, 100), {3, out});
            const auto plus_100 = [&](const Floats &x) {
                Floats y = expected(x);
                std::for_each(y.begin(), y.end(), [](float &value) { value += 100; });
                return y;
            };
            both_ways([&](Tensor &x) { return linear.forward(x, residual); }, whole_numbers(3 * in, 3), {3, in},
                      plus_100);
            CHECK(values_of(residual) == Floats(3 * out, 100));
        }
    }
    const std::string f32 = toString(DataType::F32);
    CHECK(nn::Linear(3, 2).extra_repr() == "in_features=3, out_features=2, bias=true, dtype=" + f32);
    CHECK(nn::RowParallelLinear(4, 2, false, DataType::F32, device, 1, 2).extra_repr() ==
          "in_features=4, out_features=2, bias=false, dtype=" + f32 + ", tp_rank=1, tp_size=2");
    CHECK(nn::Linear(3, 2).weight()->device() == Device::cpu());
}

void test_column_parallel() {
    const size_t in = 10, out = 9, ranks = 3;
    const Floats w = whole_numbers(in * out, 1), b = whole_numbers(out, 2), x = whole_numbers(2 * in, 3);
    for (size_t rank = 0; rank < ranks; ++rank) {
        nn::ColumnParallelLinear linear(in, out, true, DataType::F32, device, rank, ranks);
        linear.load_state_dict({{"weight", floats(w, {out, in})}, {"bias", floats(b, {out})}});
        const size_t part = out / ranks;
        const Floats own_w(w.begin() + static_cast<long>(rank * part * in),
                           w.begin() + static_cast<long>((rank + 1) * part * in));
        const Floats own_b(b.begin() + static_cast<long>(rank * part),
                           b.begin() + static_cast<long>((rank + 1) * part));
        both_ways([&](Tensor &input) { return linear.forward(input); }, x, {2, in},
                  [&](const Floats &values) { return product(values, own_w, own_b, in, part, 0, in); });
        CHECK(linear.out_features() == out && linear.weight()->size(0) == part);
    }
}

// Without a communicator each rank has its own term; rank 0 alone adds the bias.
void test_row_parallel_terms() {
    const size_t in = 12, out = 5, ranks = 3;
    const Floats w = whole_numbers(in * out, 1), b = whole_numbers(out, 2), x = whole_numbers(2 * in, 3);
    for (size_t rank = 0; rank < ranks; ++rank) {
        nn::RowParallelLinear linear(in, out, true, DataType::F32, device, rank, ranks);
        linear.load_parameter("weight", floats(w, {out, in}));
        linear.load_parameter("bias", floats(b, {out})); // on every rank
        Tensor part = floats(x, {2, in})->narrow({{1, rank * 4, 4}});
        CHECK(values_of(linear.forward(part)) ==
              product(x, w, rank == 0 ? b : Floats(), in, out, rank * 4, rank * 4 + 4));
    }
}

void test_row_parallel() {
    if (device.getType() != Device::Type::CPU) {
        return; // one device has one rank
    }
    const size_t in = 12, out = 5, ranks = 3;
    const Floats w = whole_numbers(in * out, 1), b = whole_numbers(out, 2);
    std::vector<infinicclComm_t> communicators(ranks);
    CHECK(infinicclCommInitAll(static_cast<infiniDevice_t>(device.getType()), communicators.data(),
                               static_cast<int>(ranks), nullptr) == INFINI_STATUS_SUCCESS);
    std::vector<std::vector<Floats>> results(ranks);
    std::vector<std::thread> threads;
    const std::vector<Floats> inputs{whole_numbers(2 * in, 3), whole_numbers(2 * in, 4), whole_numbers(2 * in, 5)};
    const auto of_rank = [&](size_t rank) {
        const size_t part = in / ranks;
        nn::RowParallelLinear linear(in, out, true, DataType::F32, device, rank, ranks, communicators[rank]);
        linear.load_state_dict({{"weight", floats(w, {out, in})}, {"bias", floats(b, {out})}});
        Tensor whole = floats(inputs[0], {2, in}), residual = floats(Floats(2 * out, 50), {2, out});
        Tensor x = whole->narrow({{1, rank * part, part}});
        // The residual is added once.
        std::vector<Floats> made{values_of(linear.forward(x)), values_of(linear.forward(x, residual))};
        context::setDevice(device);
        context::startGraphRecording();
        const Tensor sum = linear.forward(x);
        const auto graph = context::stopGraphRecording();
        for (const Floats &input : inputs) {
            whole->copy_from(floats(input, {2, in}));
            graph->run();
            made.push_back(values_of(sum));
        }
        return made;
    };
    for (size_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] { CHECK_RUNS("a rank", results[rank] = of_rank(rank)); });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (size_t rank = 0; rank < ranks && failures() == 0; ++rank) {
        Floats plus_50 = product(inputs[0], w, b, in, out, 0, in);
        CHECK(results[rank][0] == plus_50);
        std::for_each(plus_50.begin(), plus_50.end(), [](float &value) { value += 50; });
        CHECK(results[rank][1] == plus_50);
        for (size_t i = 0; i < inputs.size(); ++i) {
            CHECK(results[rank][2 + i] == product(inputs[i], w, b, in, out, 0, in));
        }
        CHECK(infinicclCommDestroy(communicators[rank]) == INFINI_STATUS_SUCCESS);
    }
}

// ---- embedding, rms norm ----

void test_embedding() {
    const Floats w = whole_numbers(5 * 3, 1);
    Tensor::ones({5, 3}, DataType::F32, device); // so that the memory that comes next is not zeros by chance
    nn::Embedding embedding(5, 3, -2, DataType::F32, device);
    CHECK(embedding.padding_idx() == 3 && embedding.num_embeddings() == 5 && embedding.embedding_dim() == 3);
    CHECK(values_of(embedding.weight()->narrow({{0, 3, 1}})) == Floats(3));
    CHECK(embedding.extra_repr() ==
          "num_embeddings=5, embedding_dim=3, padding_idx=3, dtype=" + toString(DataType::F32));
    embedding.load_parameter("weight", floats(w, {5, 3}));
    const auto rows = [&](const std::vector<int64_t> &ids) {
        Floats found;
        for (const int64_t id : ids) {
            found.insert(found.end(), w.begin() + id * 3, w.begin() + id * 3 + 3);
        }
        return found;
    };
    const std::vector<int64_t> ids{4, 0, 3, 3, 1, 2}, others{1, 1, 0, 4, 2, 3};
    for (const Device on : {device, Device::cpu()}) {
        Tensor indices = tensor(ids, {2, 3}, DataType::I64, on);
        const Tensor found = embedding.forward(indices);
        CHECK(found->shape() == (Shape{2, 3, 3}) && found->device() == device && values_of(found) == rows(ids));
        const Tensor narrow = tensor(std::vector<int32_t>{2, 4}, {2}, DataType::I32, on);
        CHECK(values_of(embedding.forward(narrow)) == rows({2, 4}));
        context::setDevice(device);
        context::startGraphRecording();
        const Tensor replayed = embedding.forward(indices);
        const auto graph = context::stopGraphRecording();
        for (const auto &next : {others, ids}) {
            indices->copy_from(tensor(next, {2, 3}, DataType::I64, on));
            graph->run();
            CHECK(values_of(replayed) == rows(next));
        }
    }
    CHECK(!nn::Embedding(5, 3).padding_idx());
    THROWS(nn::Embedding(5, 3, 5), "infinicore::nn::Embedding: padding_idx must be from -5 to 4, got 5");
    THROWS(nn::Embedding(5, 3, -6), "infinicore::nn::Embedding: padding_idx must be from -5 to 4, got -6");
}

void test_rms_norm() {
    nn::RMSNorm norm(7, 0.125, DataType::F32, device);
    CHECK(norm.normalized_shape() == 7 && norm.eps() == 0.125 && norm.dtype() == DataType::F32);
    CHECK(values_of(norm.weight()) == Floats(7, 1));
    CHECK(norm.extra_repr() == "normalized_shape=7, eps=0.125, dtype=" + toString(DataType::F32));
    const Floats w = whole_numbers(7, 1), x = whole_numbers(21, 2);
    norm.load_parameter("weight", floats(w, {7}));
    const Floats y = values_of(norm.forward(floats(x, {3, 7})));
    for (size_t row = 0; row < 3; ++row) {
        double squares = 0;
        for (size_t i = 0; i < 7; ++i) {
            squares += static_cast<double>(x[row * 7 + i]) * x[row * 7 + i];
        }
        for (size_t i = 0; i < 7; ++i) {
            const double exact = x[row * 7 + i] / std::sqrt(squares / 7 + 0.125) * w[i];
            CHECK(std::fabs(y[row * 7 + i] - exact) <= 4e-7 * std::fabs(exact)); // a few roundings of float
        }
    }
}

// ---- RoPE ----

struct Tables : nn::RoPE {
    using nn::RoPE::cos_cache_;
    using nn::RoPE::RoPE;
    using nn::RoPE::sin_cache_;
};

// Angles in float128 would be the reference; long double has 11 bits more than double, which is enough to see a mistake.
long double angle_of(size_t position, size_t pair, size_t head_dim, double theta, double factor = 1) {
    return position * std::pow(static_cast<long double>(theta), -2.0L * pair / head_dim) / factor;
}

void check_table(const Tensor &table, DataType dtype, const std::function<long double(size_t, size_t)> &exact) {
    const size_t positions = table->size(0), pairs = table->size(1);
    CHECK(table->dtype() == dtype);
    const std::vector<uint8_t> bytes = [&] {
        const Tensor host = table->to(Device::cpu());
        const auto *const data = reinterpret_cast<const uint8_t *>(host->data());
        return std::vector<uint8_t>(data, data + host->nbytes());
    }();
    // Half a unit in the last place, and what double's angles are off.
    const int bits = dtype == DataType::F16 ? 11 : dtype == DataType::BF16 ? 8 : dtype == DataType::F32 ? 24 : 53;
    for (size_t position = 0; position < positions; ++position) {
        for (size_t pair = 0; pair < pairs; ++pair) {
            const size_t at = position * pairs + pair;
            long double value = 0;
            if (dtype == DataType::F32 || dtype == DataType::F64) {
                float single = 0;
                double twice = 0;
                dtype == DataType::F32 ? std::memcpy(&single, &bytes[at * 4], 4)
                                       : std::memcpy(&twice, &bytes[at * 8], 8);
                value = dtype == DataType::F32 ? single : twice;
            } else {
                uint16_t half = 0;
                std::memcpy(&half, &bytes[at * 2], 2);
                value = of_half(half, dtype);
            }
            const long double wanted = exact(position, pair), size = std::fabs(wanted);
            const int exponent = size == 0 ? -24 : std::max(std::ilogb(size), dtype == DataType::F16 ? -14 : -126);
            const long double half_unit = std::ldexp(1.0L, exponent - bits);
            const long double of_angle = (static_cast<long double>(position) + 1) * 4e-16L;
            if (!(std::fabs(value - wanted) <= half_unit * 1.0001L + of_angle)) {
                std::printf("position %zu, pair %zu, %s: %.17Lg, not %.17Lg\n", position, pair, toString(dtype).c_str(),
                            value, wanted);
                ++failures();
                return;
            }
        }
    }
}

void test_rope_tables() {
    for (const DataType dtype : {DataType::F64, DataType::F32, DataType::F16, DataType::BF16}) {
        for (const auto &[head_dim, theta] : {std::pair<size_t, double>{2, 10000.0}, {34, 500000.0}, {64, 1.5}}) {
            const Tables rope(head_dim, 300, theta, nn::RoPE::Algo::GPT_NEOX, dtype, device);
            CHECK(rope.sin_cache_->shape() == (Shape{300, head_dim / 2}) && rope.sin_cache_->device() == device);
            const auto angle = [head_dim = head_dim, theta = theta](size_t position, size_t pair) {
                return angle_of(position, pair, head_dim, theta);
            };
            check_table(rope.sin_cache_, dtype, [&](size_t p, size_t i) { return std::sin(angle(p, i)); });
            check_table(rope.cos_cache_, dtype, [&](size_t p, size_t i) { return std::cos(angle(p, i)); });
        }
    }
    CHECK(nn::RoPE(4, 2).state_dict().empty()); // tables are buffers
}

void test_rope() {
    const size_t dim = 6, heads = 2, tokens = 3;
    const std::vector<int64_t> positions{5, 0, 9}, later{1, 2, 3};
    const Floats x = whole_numbers(tokens * heads * dim, 1);
    for (const auto algo : {nn::RoPE::Algo::GPT_J, nn::RoPE::Algo::GPT_NEOX}) {
        const nn::RoPE rope(dim, 10, 100.0, algo, DataType::F32, device);
        CHECK(rope.head_dim() == dim && rope.max_seq_len() == 10 && rope.theta() == 100 && rope.algo() == algo);
        const auto check = [&](const Tensor &y, const std::vector<int64_t> &at) {
            const Floats got = values_of(y);
            for (size_t row = 0; row < tokens * heads; ++row) {
                for (size_t pair = 0; pair < dim / 2; ++pair) {
                    const bool neighbours = algo == nn::RoPE::Algo::GPT_J;
                    const size_t first = row * dim + (neighbours ? 2 * pair : pair);
                    const size_t second = neighbours ? first + 1 : first + dim / 2;
                    const long double turn = angle_of(static_cast<size_t>(at[row / heads]), pair, dim, 100);
                    const long double s = std::sin(turn), c = std::cos(turn);
                    // Products and a difference of numbers up to 4, in float.
                    CHECK(std::fabs(got[first] - (x[first] * c - x[second] * s)) < 2e-6L);
                    CHECK(std::fabs(got[second] - (x[first] * s + x[second] * c)) < 2e-6L);
                }
            }
        };
        const Shape shape{tokens, heads, dim};
        const Tensor input = floats(x, shape);
        Tensor pos = tensor(positions, {tokens}, DataType::I64);
        check(rope.forward(input, pos), positions);
        CHECK(values_of(input) == x);
        const Tensor y = Tensor::empty(shape, DataType::F32, device);
        const Tensor same = rope.forward(y, input, pos);
        check(y, positions);
        CHECK(same->data() == y->data() && values_of(input) == x);
        const Tensor own = floats(x, shape);
        CHECK(rope.forward(own, pos, true)->data() == own->data());
        check(own, positions);
        context::setDevice(device);
        context::startGraphRecording();
        const Tensor replayed = rope.forward(input, pos);
        const auto graph = context::stopGraphRecording();
        for (const auto &next : {later, positions}) {
            pos->copy_from(tensor(next, {tokens}, DataType::I64));
            graph->run();
            check(replayed, next);
        }
    }
    CHECK(nn::RoPE(4, 2).extra_repr() ==
          "head_dim=4, max_seq_len=2, theta=10000, algo=GPT_J, dtype=" + toString(DataType::F32));
    const std::string name = "infinicore::nn::RoPE: ";
    THROWS(nn::RoPE(5, 2), name + "head_dim must be even and above 0, got 5");
    THROWS(nn::RoPE(0, 2), name + "head_dim must be even and above 0, got 0");
    THROWS(nn::RoPE(4, 2, 0), name + "theta must be finite and above 0, got 0");
    THROWS(nn::RoPE(4, 2, 1e4, nn::RoPE::Algo::GPT_J, DataType::I32),
           name + "dtype must be " + toString(DataType::F16) + ", " + toString(DataType::BF16) + ", " +
               toString(DataType::F32) + " or " + toString(DataType::F64) + ", got " + toString(DataType::I32));
}

void test_long_rope() {
    using Long = nn::RoPE::LongRopeConfig;
    const std::vector<float> brief{1, 1.25f}, stretched{2, 8};
    const auto check = [&](size_t length, float factor, const std::vector<float> &factors, long double magnitude) {
        const auto config = std::make_shared<Long>(brief, stretched, 16, factor);
        CHECK(config->type() == nn::RoPE::ScalingType::LONGROPE && config->factor() == factor);
        const Tables rope(4, length, 10000.0, nn::RoPE::Algo::GPT_NEOX, DataType::F64, device, config);
        const auto angle = [&](size_t p, size_t i) { return angle_of(p, i, 4, 10000.0, factors[i]); };
        check_table(rope.sin_cache_, DataType::F64,
                    [&](size_t p, size_t i) { return magnitude * std::sin(angle(p, i)); });
        check_table(rope.cos_cache_, DataType::F64,
                    [&](size_t p, size_t i) { return magnitude * std::cos(angle(p, i)); });
    };
    check(8, 1, brief, 1);
    check(16, 1, brief, 1);
    check(64, 1, stretched, std::sqrt(1.5L));   // 1 + ln 4 / ln 16
    check(17, 256, stretched, std::sqrt(3.0L)); // 1 + ln 256 / ln 16
    check(64, 0.5f, stretched, 1);
    const std::string name = "infinicore::nn::RoPE::LongRopeConfig: ";
    THROWS(Long(brief, stretched, 1), name + "original_max_position_embeddings must be at least 2, got 1");
    THROWS(Long(brief, stretched, 16, 0), name + "factor must be finite and above 0, got 0");
    THROWS(Long(brief, {1, -1}, 16), name + "long_factor must have finite numbers above 0, got -1");
    THROWS(nn::RoPE(8, 32, 1e4, nn::RoPE::Algo::GPT_J, DataType::F32, device,
                    std::make_shared<Long>(brief, stretched, 16)),
           "infinicore::nn::RoPE: long_factor must have 4 numbers, one for each pair of columns, got 2");
}

} // namespace

int main(int argc, char **argv) {
    device = device_of(argc, argv);
    const std::pair<const char *, void (*)()> tests[] = {
        {"names", test_names},
        {"loading", test_loading},
        {"shards", test_shards},
        {"linear", test_linear},
        {"column parallel", test_column_parallel},
        {"row parallel, terms", test_row_parallel_terms},
        {"row parallel", test_row_parallel},
        {"embedding", test_embedding},
        {"rms norm", test_rms_norm},
        {"rope tables", test_rope_tables},
        {"rope", test_rope},
        {"long rope", test_long_rope},
    };
    for (const auto &[name, test] : tests) {
        CHECK_RUNS(name, test());
    }
    std::printf("%d failures\n", failures().load());
    return failures() != 0;
}
