// Tests nn::Module and nn::Parameter: names, loading and its errors, shards.
#include <algorithm>
#include <set>
#include <string>
#include <thread>

#include "nn_values.h"

namespace {

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

// Threads may ask for the names at once, also the first time: all get the same parameters.
void test_names_on_threads() {
    for (int round = 0; round < 100; ++round) {
        const Forest forest;
        const nn::Parameter *found[4];
        std::vector<std::thread> threads;
        for (const nn::Parameter *&own : found) {
            threads.emplace_back([&] { own = &forest.state_dict().at("tree.leaf.weight"); });
        }
        std::for_each(threads.begin(), threads.end(), [](std::thread &thread) { thread.join(); });
        CHECK(std::count(found, found + 4, found[0]) == 4 && (*found[0])->shape() == (Shape{1, 2}));
    }
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

} // namespace

int main(int count, char **arguments) {
    device = device_of(count, arguments);
    CHECK_RUNS("names", test_names());
    CHECK_RUNS("names on threads", test_names_on_threads());
    CHECK_RUNS("loading", test_loading());
    CHECK_RUNS("shards", test_shards());
    return failures() != 0;
}
