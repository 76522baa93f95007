// Tests nn::Linear, its tensor-parallel forms with one thread a rank, and a fused weight as engines derive it.
#include <algorithm>
#include <thread>

#include "nn_values.h"

namespace {

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

// q, k and v of an attention as one product, the way engines derive from ColumnParallelLinear: the parts are views of the
// fused weight, which a checkpoint fills under names of its own.
class FusedQKV : public nn::ColumnParallelLinear {
public:
    FusedQKV(size_t hidden, size_t queries, size_t keys, Size tp_rank, Size tp_size)
        : ColumnParallelLinear(hidden, queries + 2 * keys, true, DataType::F32, device, tp_rank, tp_size),
          sizes_{queries / tp_size, keys / tp_size, keys / tp_size} {}

    nn::Parameter part(size_t index, const nn::Parameter &of) const {
        size_t start = 0;
        for (size_t i = 0; i < index; ++i) {
            start += sizes_[i];
        }
        return nn::Parameter(of->narrow({{0, start, sizes_[index]}}), 0, tp_rank_, tp_size_);
    }
    nn::Parameter weight_of(size_t index) const { return part(index, weight_); }
    nn::Parameter bias_of(size_t index) const { return part(index, bias_); }
    Tensor part_of(const Tensor &output, size_t index) const {
        return output->narrow({{1, index == 0 ? 0 : sizes_[0] + (index - 1) * sizes_[1], sizes_[index]}});
    }

    std::vector<size_t> sizes_;
};

struct FusedAttention : nn::Module {
    FusedAttention(size_t hidden, size_t queries, size_t keys, Size tp_rank, Size tp_size)
        : qkv(std::make_shared<FusedQKV>(hidden, queries, keys, tp_rank, tp_size)) {
        const char *const names[] = {"q_proj", "k_proj", "v_proj"};
        for (size_t i = 0; i < 3; ++i) {
            register_parameter(std::string(names[i]) + ".weight", qkv->weight_of(i));
            register_parameter(std::string(names[i]) + ".bias", qkv->bias_of(i));
        }
    }
    std::shared_ptr<FusedQKV> qkv;
};

void test_fused_columns() {
    const size_t hidden = 6, ranks = 2;
    const size_t sizes[] = {8, 4, 4};
    const std::string names[] = {"q_proj", "k_proj", "v_proj"};
    const Floats x = whole_numbers(3 * hidden, 7);
    for (size_t rank = 0; rank < ranks; ++rank) {
        FusedAttention attention(hidden, sizes[0], sizes[1], rank, ranks);
        CHECK(attention.state_dict().size() == 6);
        for (unsigned i = 0; i < 3; ++i) {
            attention.load_parameter(names[i] + ".weight",
                                     floats(whole_numbers(sizes[i] * hidden, 10 + i), {sizes[i], hidden}));
            attention.load_parameter(names[i] + ".bias", floats(whole_numbers(sizes[i], 20 + i), {sizes[i]}));
        }
        Tensor input = floats(x, {3, hidden});
        const Tensor output = attention.qkv->forward(input);
        for (unsigned i = 0; i < 3; ++i) {
            const Tensor whole = floats(product(x, whole_numbers(sizes[i] * hidden, 10 + i),
                                                whole_numbers(sizes[i], 20 + i), hidden, sizes[i], 0, hidden),
                                        {3, sizes[i]});
            const size_t part = sizes[i] / ranks;
            CHECK(values_of(attention.qkv->part_of(output, i)) == values_of(whole->narrow({{1, rank * part, part}})));
        }
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

} // namespace

int main(int count, char **arguments) {
    device = device_of(count, arguments);
    CHECK_RUNS("linear", test_linear());
    CHECK_RUNS("column parallel", test_column_parallel());
    CHECK_RUNS("fused columns", test_fused_columns());
    CHECK_RUNS("row parallel terms", test_row_parallel_terms());
    CHECK_RUNS("row parallel", test_row_parallel());
    return failures() != 0;
}
