// What the ops of infinicore:: check before they look at a tensor, products of more than three dimensions, and rows that
// an operator leaves unwritten. Values of every op: tests/test_infinicore_ops.py and test_graph.cpp.
// Usage: test_ops [CPU | NVIDIA]
#include <infinicore.hpp>

#include "check.h"
#include "device.h"
#include "random_tensors.h"

namespace {

// An empty Tensor in the place of each tensor that an op must have: a sentence with the op and the argument.
void empty_tensors(const Device &device) {
    const Tensor none, x = random({2, 4}, DataType::F32, device), ids = integers({1, 0}, device);
    Tensor out = random({2, 4}, DataType::F32, device);
    const auto neox = nn::RoPE::Algo::GPT_NEOX;
    const auto no_slopes = std::nullopt;
    const auto sentence = [](const char *op, const char *name) {
        return "infinicore::" + std::string(op) + ": " + name + " must be a tensor, got an empty one";
    };
    THROWS(op::add(none, x), sentence("add", "a"));
    THROWS(op::add(x, none), sentence("add", "b"));
    THROWS(op::add_(none, x, x), sentence("add", "c"));
    THROWS(op::add_(out, none, x), sentence("add", "a"));
    THROWS(op::mul(none, x), sentence("mul", "a"));
    THROWS(op::mul(x, none), sentence("mul", "b"));
    THROWS(op::silu(none), sentence("silu", "input"));
    THROWS(op::silu_(none, x), sentence("silu", "output"));
    THROWS(op::swiglu(none, x), sentence("swiglu", "a"));
    THROWS(op::swiglu(x, none), sentence("swiglu", "b"));
    THROWS(op::causal_softmax(none), sentence("causal_softmax", "input"));
    THROWS(op::rearrange(none), sentence("rearrange", "x"));
    THROWS(op::rearrange_(none, x), sentence("rearrange", "y"));
    THROWS(op::rms_norm(none, x), sentence("rms_norm", "x"));
    THROWS(op::rms_norm(x, none), sentence("rms_norm", "weight"));
    THROWS(op::add_rms_norm(none, x, x), sentence("add_rms_norm", "a"));
    THROWS(op::add_rms_norm(x, x, none), sentence("add_rms_norm", "weight"));
    THROWS(op::add_rms_norm_(out, none, x, x, x), sentence("add_rms_norm", "residual_out"));
    THROWS(op::linear(none, x, std::nullopt), sentence("linear", "input"));
    THROWS(op::linear(x, none, std::nullopt), sentence("linear", "weight"));
    THROWS(op::linear_(none, x, x, std::nullopt), sentence("linear", "out"));
    THROWS(op::matmul(none, x), sentence("matmul", "a"));
    THROWS(op::matmul(x, none), sentence("matmul", "b"));
    THROWS(op::gemm(none, x), sentence("gemm", "a"));
    THROWS(op::gemm_(none, x, x, 1.0f, 0.0f), sentence("gemm", "c"));
    THROWS(op::gemm_(out, none, x, 1.0f, 0.0f), sentence("gemm", "a"));
    THROWS(op::embedding(none, x), sentence("embedding", "input"));
    THROWS(op::embedding(ids, none), sentence("embedding", "weight"));
    THROWS(op::embedding_(none, ids, x), sentence("embedding", "out"));
    THROWS(op::embedding_(out, none, x), sentence("embedding", "input"));
    THROWS(op::embedding_(out, ids, none), sentence("embedding", "weight"));
    THROWS(op::rope(none, ids, x, x, neox), sentence("rope", "x"));
    THROWS(op::rope_(none, x, ids, x, x, neox), sentence("rope", "x_out"));
    THROWS(op::attention(none, x, x, x, x, 0), sentence("attention", "q"));
    THROWS(op::random_sample(none, 0.5f, 0.9f, 5, 1.0f), sentence("random_sample", "logits"));
    THROWS(op::random_sample_(none, x, 0.5f, 0.9f, 5, 1.0f), sentence("random_sample", "indices"));
    THROWS(op::ones_(none), sentence("ones", "output"));
    THROWS(op::paged_caching_(none, x, x, x, ids), sentence("paged_caching", "k_cache"));
    THROWS(op::paged_attention(none, x, x, ids, ids, no_slopes, 1.0f), sentence("paged_attention", "q"));
    THROWS(op::paged_attention(x, none, x, ids, ids, no_slopes, 1.0f), sentence("paged_attention", "k_cache"));
    THROWS(op::paged_attention_prefill(none, x, x, ids, ids, ids, no_slopes, 1.0f),
           sentence("paged_attention_prefill", "q"));
    THROWS(op::paged_attention_prefill(x, x, none, ids, ids, ids, no_slopes, 1.0f),
           sentence("paged_attention_prefill", "v_cache"));
}

// [2, 3, m, k] by [2, 3, k, n]: the bits of the products one by one, in several layouts; and what cannot be one batch.
void products_of_many_dimensions(const Device &device) {
    const auto f32 = [device](const Shape &shape) { return random(shape, DataType::F32, device); };
    const Tensor a = f32({2, 3, 5, 8}), b = f32({2, 3, 8, 4}), apart = f32({2, 6, 5, 8}), one = f32({1, 1, 8, 4});
    const auto check = [&](const Tensor &left, const Tensor &right, const Tensor &product) {
        CHECK(product->shape() == (Shape{2, 3, 5, 4}));
        if (device != Device::cpu()) { // where one matrix may be multiplied by another algorithm than a batch
            return;
        }
        for (size_t i = 0; i < 6; ++i) {
            const auto part = [&](const Tensor &t) {
                const size_t first = t->size(0) == 1 ? 0 : i / 3, second = t->size(1) == 1 ? 0 : i % 3;
                return t->narrow({{0, first, 1}, {1, second, 1}})->squeeze(0)->squeeze(0);
            };
            CHECK(bytes(part(product)) == bytes(op::matmul(part(left), part(right))));
        }
    };
    check(a, b, op::matmul(a, b));
    CHECK(bytes(op::matmul(a, b)) == bytes(op::matmul(a->view({6, 5, 8}), b->view({6, 8, 4}))));
    check(a, one, op::matmul(a, one));
    const Tensor first = f32({1, 1, 5, 8});
    check(first, b, op::matmul(first, b));
    const Tensor turned = f32({2, 3, 4, 8})->permute({0, 1, 3, 2});
    check(a, turned, op::matmul(a, turned));
    Tensor c = f32({2, 3, 5, 4});
    op::matmul_(c, a, b);
    check(a, b, c);
    CHECK(op::matmul(f32({2, 0, 5, 8}), f32({2, 0, 8, 4}))->shape() == (Shape{2, 0, 5, 4}));
    CHECK(op::matmul(f32({2, 3, 2, 5, 8}), f32({2, 3, 2, 8, 4}))->shape() == (Shape{2, 3, 2, 5, 4}));

    const Tensor gaps = apart->narrow({{1, 0, 3}});
    THROWS(op::matmul(gaps, b), "infinicore::gemm: a must have leading dimensions that lie as one (call contiguous()), "
                                "got " +
                                    gaps->info());
    THROWS(op::matmul(a, b->permute({1, 0, 2, 3})),
           "infinicore::gemm: b must have the leading dimensions of c, [2, 3], "
           "or as many of size 1, got shape [3, 2, 8, 4]");
    THROWS(
        op::matmul(a, b->narrow({{0, 0, 1}, {1, 0, 1}})->squeeze(0)),
        "infinicore::gemm: b must have the leading dimensions of c, [2, 3], or as many of size 1, got shape [1, 8, 4]");
}

// A sequence without keys: zeros, in memory that held something else.
void rows_without_keys(const Device &device) {
    const Tensor q = random({3, 4, 32}, DataType::F32, device), cache = random({6, 2, 16, 32}, DataType::F32, device);
    const Tensor tables = integers({1, 3, 0, 5, 2, 4}, device)->view({3, 2}), lens = integers({17, 0, 30}, device);
    const Tensor garbage =
        op::add(Tensor::ones({3, 4, 32}, DataType::F32, device), Tensor::ones({3, 4, 32}, DataType::F32, device));
    const auto run = [&] { return op::paged_attention(q, cache, cache, tables, lens, std::nullopt, 0.2f); };
    {
        const Tensor freed = op::rearrange(garbage); // what the result takes
    }
    const Tensor zeros = Tensor::zeros({1, 4, 32}, DataType::F32, device);
    const Tensor out = run();
    CHECK(bytes(out->narrow({{0, 1, 1}})) == bytes(zeros));
    context::startGraphRecording();
    const Tensor recorded = run();
    const auto graph = context::stopGraphRecording();
    for (int i = 0; i < 2; ++i) {
        graph->run();
        CHECK(bytes(recorded) == bytes(out));
    }
    Tensor given = op::rearrange(garbage);
    op::paged_attention_(given, q, cache, cache, tables, lens, std::nullopt, 0.2f);
    CHECK(bytes(given->narrow({{0, 1, 1}})) == bytes(garbage->narrow({{0, 1, 1}})));
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    context::setDevice(device);
    CHECK_RUNS("empty_tensors", empty_tensors(device));
    CHECK_RUNS("products_of_many_dimensions", products_of_many_dimensions(device));
    CHECK_RUNS("rows_without_keys", rows_without_keys(device));
    return failures() != 0;
}
