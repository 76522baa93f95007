// What a call of infinicore:: costs above the operator that it calls, and what memory costs: benchmarks/infinicore.py
// compiles and runs this. Prints lines "name nanoseconds ...", medians over interleaved rounds.
// Usage: infinicore_calls ROUNDS
#include <infinicore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

using namespace infinicore;

namespace {

using Call = std::function<void()>;

double once(const Call &call, int calls) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) {
        call();
    }
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls;
}

// Medians of all calls, one after another in each round.
void measure(const char *name, const std::vector<Call> &calls, int rounds, int repeats) {
    std::vector<std::vector<double>> times(calls.size());
    for (int round = 0; round <= rounds; ++round) {
        for (size_t i = 0; i < calls.size(); ++i) {
            const double time = once(calls[i], repeats);
            if (round > 0) { // the first warms up
                times[i].push_back(time);
            }
        }
    }
    std::printf("%s", name);
    for (std::vector<double> &time : times) {
        std::nth_element(time.begin(), time.begin() + rounds / 2, time.end());
        std::printf(" %.1f", time[static_cast<size_t>(rounds) / 2]);
    }
    std::printf("\n");
}

void check(infiniStatus_t status) {
    if (status != INFINI_STATUS_SUCCESS) {
        std::fprintf(stderr, "%s\n", infiniGetLastErrorMessage());
        std::exit(1);
    }
}

} // namespace

int main(int count, char **arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 9;
    const Device cpu;
    const Tensor x = Tensor::ones({1, 2048}, DataType::F32, cpu), weight = Tensor::ones({2048}, DataType::F32, cpu);
    const Tensor y = Tensor::empty({1, 2048}, DataType::F32, cpu);

    infiniopRMSNormDescriptor_t norm = nullptr;
    check(infiniopCreateRMSNormDescriptor(context::getInfiniopHandle(cpu), &norm, y->desc(), x->desc(), weight->desc(),
                                          1e-5f));
    void *const out = const_cast<std::byte *>(y->data());
    measure("rms_norm",
            {[&] { check(infiniopRMSNorm(norm, nullptr, 0, out, x->data(), weight->data(), nullptr)); },
             [&] { op::rms_norm_(y, x, weight, 1e-5f); }, [&] { op::rms_norm(x, weight, 1e-5f); }},
            rounds, 20000);
    check(infiniopDestroyRMSNormDescriptor(norm));

    measure("allocate",
            {[] { context::allocateMemory(1 << 20); }, [&] { Tensor::empty({1, 1 << 18}, DataType::F32, cpu); }},
            rounds, 20000);

    // Eight ops of a few elements: all cost is that of calling them.
    const Tensor a = Tensor::ones({4}, DataType::F32, cpu), b = Tensor::ones({4}, DataType::F32, cpu);
    const Tensor c = Tensor::empty({4}, DataType::F32, cpu);
    const auto eight = [&] {
        for (int i = 0; i < 8; ++i) {
            op::add_(c, a, b);
        }
    };
    context::startGraphRecording();
    eight();
    const auto graph = context::stopGraphRecording();
    measure("eight_adds", {eight, [&] { graph->run(); }}, rounds, 5000);
    return 0;
}
