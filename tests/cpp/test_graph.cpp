// Recording in infinicore::: every op noted, none run; replays on changed contents, bit for bit as without a graph; memory
// of a graph; ops and functions of a caller's own; threads; exceptions; what is refused. Fusion: test_fusion.cpp.
// Usage: test_graph [CPU | NVIDIA]
#include <infinicore.hpp>

#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "device.h"
#include "random_tensors.h"

using infinicore::op::operator+;

namespace {

void fill(Tensors &targets, const Tensors &sources) {
    for (size_t i = 0; i < targets.size(); ++i) {
        targets[i]->copy_from(sources[i]);
    }
}

// One op: what makes its inputs, new at each call, and what it gives; inputs that it writes are among the outputs.
struct Case {
    const char *name;
    std::function<Tensors()> inputs;
    std::function<Tensors(const Tensors &)> run;
};

std::vector<Case> all_ops(const Device &device) {
    const auto f32 = [device](const Shape &shape) { return random(shape, DataType::F32, device); };
    const auto bf16 = [device](const Shape &shape) { return random(shape, DataType::BF16, device); };
    const auto two = [f32] { return Tensors{f32({3, 65}), f32({3, 65})}; };
    const auto paged = [f32, device] {
        return Tensors{f32({2, 4, 32}), f32({6, 2, 16, 32}), f32({6, 2, 16, 32}),
                       integers({1, 3, 0, 5}, device)->view({2, 2}), integers({17, 30}, device)};
    };
    return {
        {"add", two, [](const Tensors &t) { return Tensors{op::add(t[0], t[1]), t[0] + t[1]}; }},
        {"add_", two,
         [](const Tensors &t) {
             op::add_(t[0], t[0], t[1]);
             return Tensors{t[0]};
         }},
        {"mul", two, [](const Tensors &t) { return Tensors{op::mul(t[0], t[1])}; }},
        {"swiglu", two, [](const Tensors &t) { return Tensors{op::swiglu(t[0], t[1])}; }},
        {"silu", two, [](const Tensors &t) { return Tensors{op::silu(t[0])}; }},
        {"causal_softmax", [f32] { return Tensors{f32({2, 5, 9})}; },
         [](const Tensors &t) { return Tensors{op::causal_softmax(t[0])}; }},
        {"rearrange", two,
         [](const Tensors &t) {
             return Tensors{op::rearrange(t[0]->permute({1, 0})), t[1]->permute({1, 0})->contiguous()};
         }},
        {"copy_from", two,
         [](const Tensors &t) {
             Tensor(t[0])->copy_from(t[1]);
             return Tensors{t[0]};
         }},
        {"ones", two,
         [](const Tensors &t) {
             op::ones_(t[0]->narrow({{0, 1, 1}}));
             return Tensors{t[0]};
         }},
        {"zeros", two,
         [device](const Tensors &t) { return Tensors{op::add(Tensor::zeros({3, 65}, DataType::F32, device), t[0])}; }},
        {"rms_norm", [bf16] { return Tensors{bf16({3, 64}), bf16({64})}; },
         [](const Tensors &t) { return Tensors{op::rms_norm(t[0], t[1], 1e-6f)}; }},
        {"add_rms_norm", [bf16] { return Tensors{bf16({3, 64}), bf16({3, 64}), bf16({64})}; },
         [](const Tensors &t) {
             const auto both = op::add_rms_norm(t[0], t[1], t[2]);
             return Tensors{both.first, both.second};
         }},
        {"gemm", [f32] { return Tensors{f32({5, 33}), f32({33, 7}), f32({5, 7})}; },
         [](const Tensors &t) {
             op::gemm_(t[2], t[0], t[1], 0.5f, 2.0f);
             return Tensors{t[2], op::gemm(t[0], t[1], 2.0f), op::gemm(t[0], t[1], 1.0f, 3.0f)};
         }},
        {"matmul", [bf16] { return Tensors{bf16({2, 5, 32}), bf16({2, 32, 7})}; },
         [](const Tensors &t) { return Tensors{op::matmul(t[0], t[1], 0.25f)}; }},
        {"linear", [bf16] { return Tensors{bf16({2, 3, 64}), bf16({48, 64}), bf16({48})}; },
         [](const Tensors &t) { return Tensors{op::linear(t[0], t[1], t[2]), op::linear(t[0], t[1], std::nullopt)}; }},
        {"embedding",
         [f32, device] { return Tensors{integers({int64_t(generator() % 5), 4, 0}, device), f32({5, 8})}; },
         [](const Tensors &t) { return Tensors{op::embedding(t[0], t[1])}; }},
        {"rope",
         [f32, device] {
             return Tensors{f32({3, 2, 16}), integers({int64_t(generator() % 9), 3, 8}, device), f32({9, 8}),
                            f32({9, 8})};
         },
         [](const Tensors &t) {
             return Tensors{op::rope(t[0], t[1], t[2], t[3], nn::RoPE::Algo::GPT_NEOX),
                            op::rope(t[0], t[1], t[2], t[3], nn::RoPE::Algo::GPT_J)};
         }},
        {"attention",
         [f32] {
             return Tensors{f32({4, 3, 32}), f32({2, 3, 32}), f32({2, 3, 32}), f32({2, 12, 32}), f32({2, 12, 32})};
         },
         [](const Tensors &t) { return Tensors{op::attention(t[0], t[1], t[2], t[3], t[4], 5), t[3], t[4]}; }},
        {"paged_caching",
         [f32, device] {
             return Tensors{f32({2, 2, 4, 8}), f32({2, 2, 4, 8}), f32({3, 2, 8}), f32({3, 2, 8}),
                            integers({int64_t(generator() % 4), 5, 7}, device)};
         },
         [](const Tensors &t) {
             op::paged_caching_(t[0], t[1], t[2], t[3], t[4]);
             return Tensors{t[0], t[1]};
         }},
        {"paged_attention", paged,
         [](const Tensors &t) {
             return Tensors{op::paged_attention(t[0], t[1], t[2], t[3], t[4], std::nullopt, 0.2f)};
         }},
        {"paged_attention_prefill",
         [paged, f32, device] {
             Tensors t = paged();
             t[0] = f32({5, 4, 32});
             t.push_back(integers({0, 2, 5}, device));
             t.push_back(f32({4}));
             return t;
         },
         [](const Tensors &t) {
             return Tensors{op::paged_attention_prefill(t[0], t[1], t[2], t[3], t[4], t[5], t[6], 0.2f)};
         }},
        {"random_sample", [f32] { return Tensors{f32({500})}; },
         [](const Tensors &t) { return Tensors{op::random_sample(t[0], 0.7f, 0.9f, 50, 0.8f)}; }},
    };
}

// Recorded on inputs whose contents do not count, replayed on others: the bits of a plain call, each time.
void replays(const Device &device) {
    for (const Case &op : all_ops(device)) {
        const auto one = [&] {
            Tensors inputs = op.inputs();
            context::startGraphRecording();
            CHECK(context::isGraphRecording());
            const Tensors outputs = op.run(inputs);
            const auto graph = context::stopGraphRecording();
            CHECK(graph != nullptr && graph->size() > 0 && !context::isGraphRecording());
            for (int round = 0; round < 3; ++round) {
                const Tensors fresh = op.inputs();
                fill(inputs, fresh);
                graph->run();
                const auto replayed = bytes(outputs);
                const auto eager = bytes(op.run(fresh));
                if (replayed != eager) {
                    std::printf("%s: a replay is not what a call gives\n", op.name);
                    CHECK(false);
                }
            }
        };
        CHECK_RUNS(op.name, one());
    }
}

void nothing_is_run(const Device &device) {
    Tensor x = Tensor::ones({4}, DataType::F32, device), y = Tensor::zeros({4}, DataType::F32, device);
    context::startGraphRecording();
    op::add_(y, x, x);
    op::add_(y, y, x);
    const auto graph = context::stopGraphRecording();
    CHECK(bytes(y) == bytes(Tensor::zeros({4}, DataType::F32, device)));
    graph->run();
    CHECK(bytes(y) == bytes(op::add(op::add(x, x), x)));
}

// 10,000 replays use no more memory than one; a chain of ops uses the memory of two; the graph keeps what it needs.
void memory(const Device &device) {
    std::shared_ptr<graph::Graph> graph;
    Tensor out, in = random({1 << 16}, DataType::F32, device);
    const Tensor copy = op::rearrange(in);
    const size_t before = context::memoryStats(device).in_use;
    {
        Tensor weight = Tensor::ones({1 << 16}, DataType::F32, device);
        context::startGraphRecording();
        Tensor x = op::mul(in, weight);
        for (int i = 0; i < 50; ++i) {
            x = op::add(x, weight);
        }
        out = x;
        graph = context::stopGraphRecording();
    }
    CHECK(context::memoryStats(device).in_use <= before + 4 * (size_t{1} << 18));
    graph->run();
    const auto first = bytes(out);
    const MemoryStats stats = context::memoryStats(device);
    context::trimMemory(device); // what the graph uses is not free
    Tensor small_in = random({64}, DataType::F32, device);
    context::startGraphRecording();
    const Tensor small = op::silu(op::mul(small_in, small_in));
    const auto quick = context::stopGraphRecording();
    for (int i = 0; i < 10000; ++i) {
        quick->run();
    }
    graph->run();
    CHECK(bytes(out) == first && context::memoryStats(device).in_use <= stats.in_use + 4096);
    Tensor sum = op::mul(copy, Tensor::ones({1 << 16}, DataType::F32, device));
    for (int i = 0; i < 50; ++i) {
        sum = op::add(sum, Tensor::ones({1 << 16}, DataType::F32, device));
    }
    CHECK(bytes(sum) == first);
    graph.reset();
    CHECK(bytes(out) == first); // its memory outlives the graph
    out = Tensor();
    sum = Tensor();
    context::syncDevice();
    CHECK(context::memoryStats(device).in_use <= before + 8192);
}

// An op of the graph kind as a caller writes it.
struct Plan {
    graph::GraphTensor y, x;
};
int live_plans = 0;

INFINICORE_GRAPH_OP_CLASS(Twice, Tensor, Tensor);
INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(Twice);

void *plan_twice(Tensor y, Tensor x) {
    ++live_plans;
    return new Plan{y, x};
}
void run_twice(void *meta) {
    const auto *const plan = static_cast<const Plan *>(meta);
    plan->x.resume();
    op::add_(plan->y, plan->x, plan->x);
}
void cleanup_twice(void **meta) {
    --live_plans;
    delete static_cast<Plan *>(*meta);
    *meta = nullptr;
}
INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(Twice, plan_twice, run_twice, cleanup_twice);

Twice::Twice(Tensor y, Tensor x) {
    INFINICORE_GRAPH_OP_DISPATCH(y->device().getType(), y, x);
}
void Twice::execute(Tensor y, Tensor x) {
    INFINICORE_GRAPH_OP_RECORD_OR_RUN(Twice, y, x);
}

int other_silus = 0;
void other_silu(Tensor output, Tensor input) {
    ++other_silus;
    op::add_(output, input, input);
}

void callers_own(const Device &device) {
    Tensor x = Tensor::ones({4}, DataType::F32, device), y = Tensor::empty({4}, DataType::F32, device);
    Twice::execute(y, x);
    CHECK(live_plans == 0 && bytes(y) == bytes(op::add(x, x)));
    {
        context::startGraphRecording();
        Twice::execute(y, x);
        Twice::execute(y, y);
        int calls = 0;
        context::addGraphOperator(std::make_shared<graph::HostOperator>([&calls] { ++calls; }, "counted"));
        const auto graph = context::stopGraphRecording();
        CHECK(live_plans == 2);
        graph->run();
        graph->run();
        const Tensor two = op::add(x, x);
        CHECK(bytes(y) == bytes(op::add(two, two)) && calls == (device == Device::cpu() ? 2 : 1));
        CHECK(graph->report().find("\n  Twice\n  Twice\n  counted") != std::string::npos);
    }
    CHECK(live_plans == 0);

    const auto ours = op::Silu::dispatcher().lookup(device.getType());
    op::Silu::dispatcher().registerDevice(device.getType(), other_silu, false);
    CHECK(op::Silu::dispatcher().lookup(device.getType()) == ours);
    op::Silu::dispatcher().registerDevice({device.getType()}, other_silu);
    CHECK(bytes(op::silu(x)) == bytes(op::add(x, x)) && other_silus == 1);
    context::startGraphRecording();
    const Tensor z = op::silu(x);
    const auto graph = context::stopGraphRecording();
    CHECK(other_silus == (device == Device::cpu() ? 1 : 2)); // a capture calls it
    graph->run();
    CHECK(bytes(z) == bytes(op::add(x, x)) && other_silus == 2);
    op::Silu::dispatcher().registerDevice(device.getType(), ours);
    op::common::OpDispatcher<op::Silu::schema> none("none");
    THROWS(none.lookup(Device::Type::CPU), "infinicore::none: no implementation is registered for CPU");
}

void refusals(const Device &device) {
    Tensor x = Tensor::ones({2, 4}, DataType::F32, device), host = Tensor::ones({2, 4}, DataType::F32, Device::cpu());
    THROWS(context::addGraphOperator(nullptr),
           "infinicore::context::addGraphOperator: no graph is recorded on this thread");
    CHECK(context::stopGraphRecording() == nullptr); // warns
    context::setDevice(device);
    context::startGraphRecording();
    Tensor y = op::add(x, x);
    THROWS(y->debug(), "infinicore::Tensor::debug: a tensor that is only recorded has no values before Graph::run()");
    THROWS(x->debug(), "infinicore::Tensor::debug: values cannot be read while a graph is recorded");
    THROWS(context::memcpyH2D(x->data(), host->data(), 4),
           "infinicore::context: a copy of an address cannot be recorded: use Tensor::copy_from, or copy before "
           "startGraphRecording()");
    THROWS(context::addGraphOperator(nullptr), "infinicore::context::addGraphOperator: op must not be null");
    THROWS(context::GraphRecording(), "infinicore::context::GraphRecording: this thread records a graph already");
    if (device != Device::cpu()) {
        THROWS(y->to(Device::cpu()),
               "infinicore::Tensor::copy_from: a copy to the host cannot be recorded: copy after Graph::run()");
        THROWS(op::add(host, host), "infinicore::add: a must be on NVIDIA:0, whose graph is recorded, got CPU:0");
    }
    const auto graph = context::stopGraphRecording();
    THROWS(op::add(x, y),
           "infinicore::add: b must have values, got a tensor that is only recorded: call Graph::run() first");
    context::startGraphRecording();
    THROWS(op::add(x, y),
           "infinicore::add: b must have values, got a tensor that is only recorded: call Graph::run() first");
    THROWS(graph->run(), "infinicore::graph::Graph::run: a graph cannot be run while another one is recorded");
    op::add(x, x);
    context::startGraphRecording(); // drops that, and warns
    CHECK(context::stopGraphRecording()->size() == 0);
    graph->run();
    CHECK(bytes(op::add(x, y)) == bytes(op::add(x, op::add(x, x))));

    // A guard ends the recording where an exception is thrown, and nothing stays.
    const size_t in_use = context::memoryStats(device).in_use;
    try {
        context::GraphRecording recording;
        const Tensor z = op::add(x, x);
        op::matmul(z, z); // [2, 4] by [2, 4]
        CHECK(false);
    } catch (const std::runtime_error &) {
    }
    CHECK(!context::isGraphRecording() && context::memoryStats(device).in_use == in_use);
    context::GraphRecording recording;
    op::add_(y, x, x);
    CHECK(recording.stop()->size() == 1);
    graph::Graph().run(); // an empty one
}

// One graph, run by eight threads; and a recording in each of eight.
void threads(const Device &device) {
    Tensor sum = Tensor::zeros({1000}, DataType::F32, device), one = Tensor::ones({1000}, DataType::F32, device);
    context::startGraphRecording();
    op::add_(sum, sum, one);
    const auto graph = context::stopGraphRecording();
    context::syncStream();
    std::vector<std::thread> workers;
    for (int worker = 0; worker < 8; ++worker) {
        workers.emplace_back([&] {
            for (int i = 0; i < 50; ++i) {
                if (device == Device::cpu()) {
                    graph->run();
                }
                context::setDevice(device);
                Tensor x = Tensor::ones({100}, DataType::F32, device);
                context::startGraphRecording();
                const Tensor y = op::add(op::add(x, x), x);
                const auto mine = context::stopGraphRecording();
                mine->run();
                CHECK(bytes(y) == bytes(op::add(op::add(x, x), x)));
            }
        });
    }
    for (std::thread &worker : workers) {
        worker.join();
    }
    if (device == Device::cpu()) {
        const Tensor host = sum->to(Device::cpu());
        CHECK(reinterpret_cast<const float *>(host->data())[999] == 400);
    }
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    context::setDevice(device);
    CHECK_RUNS("replays", replays(device));
    CHECK_RUNS("nothing_is_run", nothing_is_run(device));
    CHECK_RUNS("memory", memory(device));
    CHECK_RUNS("callers_own", callers_own(device));
    CHECK_RUNS("refusals", refusals(device));
    CHECK_RUNS("threads", threads(device));
    return failures() != 0;
}
