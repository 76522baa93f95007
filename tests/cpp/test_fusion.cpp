// Fusion of what was recorded: which neighbours become one op, that the bits are those of the ops alone, and where ops stay
// apart because a caller, or a later op, still sees what is between them.
// Usage: test_fusion [CPU | NVIDIA]
#include <infinicore.hpp>

#include <functional>
#include <string>

#include "check.h"
#include "device.h"
#include "random_tensors.h"

namespace {

std::shared_ptr<graph::Graph> recorded(const std::function<void()> &function) {
    context::startGraphRecording();
    function();
    return context::stopGraphRecording();
}

bool reports(const graph::Graph &graph, const std::string &text) {
    return graph.report().find(text) != std::string::npos;
}

void norms_and_gates(const Device &device) {
    for (const DataType dtype : {DataType::F32, DataType::BF16}) {
        Tensor a = random({3, 64}, dtype, device), b = random({3, 64}, dtype, device), w = random({64}, dtype, device);
        Tensor sum, norm, gated, held, held_gated;
        const auto run = [&] {
            sum = op::add(a, b);
            norm = op::rms_norm(sum, w, 1e-6f);
            gated = op::mul(op::silu(a), b);
            held = op::silu(a);
            held_gated = op::mul(b, held);
        };
        run();
        const auto eager = bytes(Tensors{sum, norm, gated, held, held_gated});
        context::startGraphRecording();
        run();
        const auto graph = context::stopGraphRecording();
        graph->run();
        CHECK(bytes(Tensors{sum, norm, gated, held, held_gated}) == eager);
        const std::string report = graph->report();
        CHECK(report.find("fused: add + rms_norm -> add_rms_norm") != std::string::npos);
        // Where silu's result is rounded, or is still held, it is kept.
        CHECK((report.find("fused: silu + mul -> swiglu") != std::string::npos) == (dtype == DataType::F32));
        CHECK(graph->size() == (dtype == DataType::F32 ? 4u : 5u));
    }
    // What a later op reads is not fused away, be its handle gone.
    Tensor a = random({64}, DataType::F32, device), out;
    context::startGraphRecording();
    {
        const Tensor s = op::silu(a);
        out = op::mul(s, a);
        op::add_(out, out, s);
    }
    const auto graph = context::stopGraphRecording();
    graph->run();
    CHECK(graph->size() == 3 && bytes(out) == bytes(op::add(op::mul(op::silu(a), a), op::silu(a))));
}

constexpr const char *kLinearAdd = "fused: linear + add -> linear_add";

// input @ weight^T [+ bias] + residual, or the other way round: what is fused has the bits of the two ops.
void products_and_sums(const Device &device, DataType dtype, Size rows) {
    const Tensor input = random({rows, 96}, dtype, device), weight = random({40, 96}, dtype, device);
    const Tensor bias = random({40}, dtype, device);
    Tensor residual = random({rows, 40}, dtype, device), first, second, in_place = random({rows, 40}, dtype, device);
    const Tensor before = op::rearrange(in_place);
    const auto run = [&] {
        first = op::add(op::linear(input, weight, bias), residual);
        second = op::add(residual, op::linear(input, weight, std::nullopt));
        op::add_(in_place, in_place, op::linear(input, weight, bias));
    };
    run();
    const auto eager = bytes(Tensors{first, second, in_place});
    in_place->copy_from(before);
    const auto graph = recorded(run);
    CHECK(graph->size() == 3 && reports(*graph, kLinearAdd) && reports(*graph, "\n  linear_add\n  linear_add\n"));
    graph->run();
    CHECK(bytes(Tensors{first, second, in_place}) == eager);
    // On other numbers: the graph has not kept any.
    residual->copy_from(random({rows, 40}, dtype, device));
    in_place->copy_from(before);
    graph->run();
    CHECK(bytes(first) == bytes(op::add(op::linear(input, weight, bias), residual)));
}

// A linear and an add that must stay two ops.
void stays(const char *name, const std::function<Tensors()> &run, const Tensors &written = {}) {
    Tensors before;
    for (const Tensor &tensor : written) {
        before.push_back(op::rearrange(tensor));
    }
    const auto eager = bytes(run());
    for (size_t i = 0; i < written.size(); ++i) {
        Tensor(written[i])->copy_from(before[i]);
    }
    Tensors outputs;
    const auto graph = recorded([&] { outputs = run(); });
    graph->run();
    if (reports(*graph, kLinearAdd) || bytes(outputs) != eager) {
        std::printf("%s: %s\n", name, graph->report().c_str());
        CHECK(false);
    }
}

void products_that_stay(const Device &device) {
    const auto f32 = [device](const Shape &shape) { return random(shape, DataType::F32, device); };
    Tensor x = f32({5, 32}), weight = f32({32, 32}), residual = f32({5, 32}), buffer = f32({6, 32});
    stays("held", [&] {
        const Tensor product = op::linear(x, weight, std::nullopt);
        return Tensors{product, op::add(product, residual)};
    });
    stays("read later", [&] {
        Tensor sum, again;
        {
            const Tensor product = op::linear(x, weight, std::nullopt);
            sum = op::add(product, residual);
            again = op::mul(product, sum);
        }
        return Tensors{sum, again};
    });
    stays("added to itself", [&] {
        const Tensor product = op::linear(x, weight, std::nullopt);
        return Tensors{op::add(product, product)};
    });
    stays("written over its input",
          [&] {
              op::add_(x, op::linear(x, weight, std::nullopt), x);
              return Tensors{x};
          },
          {x});
    stays("a residual that the product is written over", [&] {
        Tensor sum;
        {
            Tensor wide = op::add(buffer, buffer), above = wide->narrow({{0, 0, 5}});
            op::linear_(above, x, weight, std::nullopt);
            sum = op::add(above, wide->narrow({{0, 1, 5}}));
        }
        return Tensors{sum};
    });
    const Tensor turned = f32({32, 5})->permute({1, 0});
    stays("a residual of other strides", [&] { return Tensors{op::add(op::linear(x, weight, std::nullopt), turned)}; });
    // add_rms_norm takes the sum that a norm follows.
    const Tensor norm = f32({32});
    stays("a norm behind it", [&] {
        const Tensor sum = op::add(op::linear(x, weight, std::nullopt), residual);
        return Tensors{sum, op::rms_norm(sum, norm)};
    });
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    context::setDevice(device);
    CHECK_RUNS("norms_and_gates", norms_and_gates(device));
    for (const DataType dtype : {DataType::F32, DataType::BF16, DataType::F16}) {
        for (const Size rows : {1, 7, 64}) {
            CHECK_RUNS("products_and_sums", products_and_sums(device, dtype, rows));
        }
    }
    CHECK_RUNS("products_that_stay", products_that_stay(device));
    return failures() != 0;
}
