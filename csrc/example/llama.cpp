// A LLaMA on infinicore::nn: reads a folder of Hugging Face (config.json, model.safetensors) and prints greedy tokens.
//   R=$(python -m torch_infini root)
//   c++ -std=c++17 -O2 -Wall csrc/example/llama.cpp -I$R/include -L$R/lib -linfinicore_cpp_api -linfiniccl -linfinirt
//     -pthread -Wl,-rpath,$R/lib && ./a.out FOLDER RANKS cpu|nvidia graph|eager NEW_TOKENS TOKEN...
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>

#include <infinicore.hpp>

#include "checkpoint.h"

using namespace infinicore;

// ---- the model ----

struct Config {
    size_t vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, max_length;
    double eps, theta;
    bool attention_bias, mlp_bias;
    DataType dtype;
    // This rank's place.
    Device device;
    size_t rank, ranks;
    infinicclComm_t communicator;
};

Config read_config(const std::string &json) {
    const auto number = [&](const char *key, double missing) {
        const std::string value = value_of(json, key);
        return value.empty() || value == "null" ? missing : std::stod(value);
    };
    const auto size = [&](const char *key, size_t missing) { return static_cast<size_t>(number(key, missing)); };
    const std::string rope = value_of(json, "rope_type");
    if (!rope.empty() && rope != "\"default\"") {
        throw std::runtime_error("this example has no RoPE of type " + rope);
    }
    Config c{};
    c.vocabulary = size("vocab_size", 0), c.hidden = size("hidden_size", 0);
    c.intermediate = size("intermediate_size", 0), c.layers = size("num_hidden_layers", 0);
    c.heads = size("num_attention_heads", 1), c.kv_heads = size("num_key_value_heads", c.heads);
    c.head_dim = size("head_dim", c.hidden / c.heads), c.max_length = size("max_position_embeddings", 0);
    c.eps = number("rms_norm_eps", 1e-6), c.theta = number("rope_theta", 10000);
    c.attention_bias = value_of(json, "attention_bias") == "true", c.mlp_bias = value_of(json, "mlp_bias") == "true";
    return c;
}

// What a pass has beside the hidden states: the tokens' positions [tokens]; to decode, also the length [1] that the cache
// has with the new token in it.
struct Pass {
    Tensor positions, length, block_table;
    bool decodes;
};

using Column = nn::ColumnParallelLinear;
using Row = nn::RowParallelLinear;

class Attention : public nn::Module {
public:
    explicit Attention(const Config &c) : heads_(c.heads / c.ranks), kv_heads_(c.kv_heads / c.ranks), dim_(c.head_dim) {
        const size_t queries = c.heads * dim_, keys = c.kv_heads * dim_;
        const bool bias = c.attention_bias;
        INFINICORE_NN_MODULE_INIT(q_proj, c.hidden, queries, bias, c.dtype, c.device, c.rank, c.ranks);
        INFINICORE_NN_MODULE_INIT(k_proj, c.hidden, keys, bias, c.dtype, c.device, c.rank, c.ranks);
        INFINICORE_NN_MODULE_INIT(v_proj, c.hidden, keys, bias, c.dtype, c.device, c.rank, c.ranks);
        INFINICORE_NN_MODULE_INIT(o_proj, queries, c.hidden, bias, c.dtype, c.device, c.rank, c.ranks, c.communicator);
        k_cache_ = Tensor::zeros({1, kv_heads_, c.max_length, dim_}, c.dtype, c.device);
        v_cache_ = Tensor::zeros({1, kv_heads_, c.max_length, dim_}, c.dtype, c.device);
    }

    Tensor forward(Tensor &x, Tensor &residual, const Pass &pass, const nn::RoPE &rope) const {
        const size_t tokens = x->size(0);
        Tensor q = q_proj_->forward(x)->view({tokens, heads_, dim_});
        Tensor k = k_proj_->forward(x)->view({tokens, kv_heads_, dim_});
        Tensor v = v_proj_->forward(x)->view({tokens, kv_heads_, dim_}), out;
        rope.forward(q, pass.positions, true);
        rope.forward(k, pass.positions, true);
        if (pass.decodes) {
            // op::attention takes the position as a number, which a recorded step would repeat. The paged ops read it from
            // memory at each run: to them the static cache is one block of max_length slots, and a token's slot is its
            // position.
            op::paged_caching_(k_cache_, v_cache_, k, v, pass.positions);
            out = op::paged_attention(q, k_cache_, v_cache_, pass.block_table, pass.length, std::nullopt,
                                      static_cast<float>(1 / std::sqrt(static_cast<double>(dim_))));
        } else {
            out = op::attention(q->permute({1, 0, 2}), k->permute({1, 0, 2}), v->permute({1, 0, 2}),
                                k_cache_->squeeze(0), v_cache_->squeeze(0), 0);
        }
        out = out->view({tokens, heads_ * dim_});
        return o_proj_->forward(out, residual);
    }

private:
    INFINICORE_NN_MODULE(Column, q_proj);
    INFINICORE_NN_MODULE(Column, k_proj);
    INFINICORE_NN_MODULE(Column, v_proj);
    INFINICORE_NN_MODULE(Row, o_proj);
    size_t heads_, kv_heads_, dim_;
    Tensor k_cache_, v_cache_; // [1, kv_heads, max_length, dim]
};

class MLP : public nn::Module {
public:
    explicit MLP(const Config &c) {
        INFINICORE_NN_MODULE_INIT(gate_proj, c.hidden, c.intermediate, c.mlp_bias, c.dtype, c.device, c.rank, c.ranks);
        INFINICORE_NN_MODULE_INIT(up_proj, c.hidden, c.intermediate, c.mlp_bias, c.dtype, c.device, c.rank, c.ranks);
        INFINICORE_NN_MODULE_INIT(down_proj, c.intermediate, c.hidden, c.mlp_bias, c.dtype, c.device, c.rank, c.ranks,
                                  c.communicator);
    }

    Tensor forward(Tensor &x, Tensor &residual) const {
        Tensor inner = op::swiglu(up_proj_->forward(x), gate_proj_->forward(x));
        return down_proj_->forward(inner, residual);
    }

private:
    INFINICORE_NN_MODULE(Column, gate_proj);
    INFINICORE_NN_MODULE(Column, up_proj);
    INFINICORE_NN_MODULE(Row, down_proj);
};

class Layer : public nn::Module {
public:
    explicit Layer(const Config &c) {
        INFINICORE_NN_MODULE_INIT(input_layernorm, c.hidden, c.eps, c.dtype, c.device);
        INFINICORE_NN_MODULE_INIT(self_attn, c);
        INFINICORE_NN_MODULE_INIT(post_attention_layernorm, c.hidden, c.eps, c.dtype, c.device);
        INFINICORE_NN_MODULE_INIT(mlp, c);
    }

    Tensor forward(Tensor x, const Pass &pass, const nn::RoPE &rope) const {
        Tensor normed = input_layernorm_->forward(x);
        x = self_attn_->forward(normed, x, pass, rope);
        normed = post_attention_layernorm_->forward(x);
        return mlp_->forward(normed, x);
    }

private:
    INFINICORE_NN_MODULE(nn::RMSNorm, input_layernorm);
    INFINICORE_NN_MODULE(Attention, self_attn);
    INFINICORE_NN_MODULE(nn::RMSNorm, post_attention_layernorm);
    INFINICORE_NN_MODULE(MLP, mlp);
};

class Llama : public nn::Module {
public:
    explicit Llama(
        const Config &c) { // the checkpoint's names have dots where it has modules that are not worth a class
        embed_tokens_ = register_module<nn::Embedding>("model.embed_tokens", c.vocabulary, c.hidden, std::nullopt,
                                                       c.dtype, c.device);
        layers_ = register_modules<Layer>(c.layers, "model.layers", c);
        norm_ = register_module<nn::RMSNorm>("model.norm", c.hidden, c.eps, c.dtype, c.device);
        INFINICORE_NN_MODULE_INIT(lm_head, c.hidden, c.vocabulary, false, c.dtype, c.device);
        INFINICORE_NN_MODULE_INIT(rope, c.head_dim, c.max_length, c.theta, nn::RoPE::Algo::GPT_NEOX, c.dtype, c.device);
    }

    // Writes the likeliest next token to next [].
    void forward(const Tensor &tokens, const Pass &pass, Tensor next) const {
        Tensor x = embed_tokens_->forward(tokens);
        for (const auto &layer : layers_) {
            x = layer->forward(x, pass, *rope_);
        }
        x = norm_->forward(x->narrow({{0, x->size(0) - 1, 1}}));
        op::random_sample_(next, lm_head_->forward(x)->squeeze(0), 0.0f, 1.0f, 1, 1.0f);
    }

private:
    INFINICORE_NN_MODULE(nn::Embedding, embed_tokens);
    INFINICORE_NN_MODULE_VEC(Layer, layers);
    INFINICORE_NN_MODULE(nn::RMSNorm, norm);
    INFINICORE_NN_MODULE(nn::Linear, lm_head);
    INFINICORE_NN_MODULE(nn::RoPE, rope);
};

// ---- generation ----

Tensor numbers(std::vector<int64_t> values, const Shape &shape, Device device) {
    Tensor made = Tensor::empty(shape, DataType::I64, device);
    made->copy_from(Tensor::from_blob(values.data(), shape, DataType::I64, Device::cpu()));
    context::syncStream(); // a stream of the CPU may be a queue (INFINI_CPU_STREAMS), and the values end here
    return made;
}

std::vector<int64_t> generate(const Config &c, Safetensors &checkpoint, const std::vector<int64_t> &prompt,
                              size_t new_tokens, bool records) {
    context::setDevice(c.device);
    Llama model(c);
    for (const auto &named : model.state_dict()) {
        const Tensor given = checkpoint.tensor(named.first);
        const bool tied = !given && named.first == "lm_head.weight";
        model.load_parameter(named.first, tied ? checkpoint.tensor("model.embed_tokens.weight") : given);
    }
    std::vector<int64_t> positions(prompt.size());
    std::iota(positions.begin(), positions.end(), 0);
    Tensor token = numbers({0}, {1}, c.device); // each step reads it, and leaves the next one there
    const Pass prefill{numbers(positions, {prompt.size()}, c.device), {}, {}, false};
    model.forward(numbers(prompt, {prompt.size()}, c.device), prefill, token->squeeze(0));

    Pass step{numbers({0}, {1}, c.device), numbers({0}, {1}, c.device), numbers({0}, {1, 1}, c.device), true};
    std::shared_ptr<graph::Graph> graph;
    if (records) {
        context::startGraphRecording();
        model.forward(token, step, token->squeeze(0));
        graph = context::stopGraphRecording();
    }
    std::vector<int64_t> made;
    for (auto length = static_cast<int64_t>(prompt.size());; ++length) {
        context::syncStream();
        const Tensor value = token->to(Device::cpu());
        made.push_back(*reinterpret_cast<const int64_t *>(value->data()));
        if (made.size() >= new_tokens) {
            return made;
        }
        step.positions->copy_from(numbers({length}, {1}, Device::cpu()));
        step.length->copy_from(numbers({length + 1}, {1}, Device::cpu()));
        context::setDevice(c.device);
        records ? graph->run() : model.forward(token, step, token->squeeze(0));
    }
}

int main(int argc, char **argv) try {
    if (argc < 7) {
        throw std::runtime_error("usage: llama FOLDER RANKS cpu|nvidia graph|eager NEW_TOKENS TOKEN...");
    }
    const std::string folder = argv[1];
    const auto ranks = static_cast<size_t>(std::stoul(argv[2])), new_tokens = static_cast<size_t>(std::stoul(argv[5]));
    const auto type = std::string(argv[3]) == "nvidia" ? Device::Type::NVIDIA : Device::Type::CPU;
    const bool records = std::string(argv[4]) == "graph";
    std::vector<int64_t> prompt;
    std::transform(argv + 6, argv + argc, std::back_inserter(prompt), std::atoll);
    Safetensors checkpoint(folder + "/model.safetensors");
    Config config = read_config(read_file(folder + "/config.json"));
    config.dtype = checkpoint.tensor("model.embed_tokens.weight")->dtype();
    config.ranks = ranks;
    if (ranks == 0 || config.kv_heads % ranks != 0 || prompt.size() + new_tokens > config.max_length) {
        throw std::runtime_error("RANKS must divide the key heads, and the tokens must fit into the model's context");
    }
    std::vector<infinicclComm_t> communicators(ranks); // one rank needs none: on NVIDIA devices there may be no NCCL
    if (ranks > 1 && infinicclCommInitAll(static_cast<infiniDevice_t>(type), communicators.data(),
                                          static_cast<int>(ranks), nullptr)) {
        throw std::runtime_error(infiniGetLastErrorMessage());
    }
    std::vector<std::vector<int64_t>> made(ranks); // by each rank: the same
    std::vector<std::thread> threads;
    std::atomic<bool> failed = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, own = config, rank]() mutable {
            try {
                own.rank = rank, own.communicator = communicators[rank];
                own.device = Device(type, type == Device::Type::CPU ? 0 : rank);
                made[rank] = generate(own, checkpoint, prompt, new_tokens, records);
            } catch (const std::exception &error) {
                std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
                failed = true;
                if (ranks > 1) {
                    infinicclCommAbort(communicators[rank]); // so that no other rank waits for this one
                }
            }
        });
    }
    std::for_each(threads.begin(), threads.end(), [](std::thread &thread) { thread.join(); });
    if (ranks > 1) {
        std::for_each(communicators.begin(), communicators.end(), infinicclCommDestroy);
    }
    for (const std::vector<int64_t> &tokens : made) {
        for (const int64_t token : tokens) {
            std::printf("%lld ", static_cast<long long>(token));
        }
        std::puts("");
    }
    return failed ? 1 : 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "llama: %s\n", error.what());
    return 1;
}
