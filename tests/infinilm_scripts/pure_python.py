"""A LLaMA written in Python on infinicore.nn, with infinilm's DynamicCache: no engine at all.

python pure_python.py FOLDER PROMPT NEW_TOKENS
"""

import json
import sys

import infinicore
from infinicore import nn
from infinicore.nn import functional as F
from infinilm.cache_utils import Cache, DynamicCache
from safetensors.torch import load_file

path, prompt, new = sys.argv[1], [int(token) for token in sys.argv[2].split(",")], int(sys.argv[3])
with open(f"{path}/config.json") as file:
    config = json.load(file)
theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
where = {"device": infinicore.device("cpu", 0), "dtype": infinicore.float32}


class Attention(nn.Module):
    def __init__(self, layer, rope):
        super().__init__()
        hidden = config["hidden_size"]
        self.layer = layer
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False, **where)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False, **where)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False, **where)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False, **where)
        self.rope = [rope]  # in a list: no submodule of each layer

    def forward(self, x, positions, cache: Cache):
        _, length, _ = x.shape
        q = self.rope[0](self.q_proj(x).view([1, length, heads, dim]), positions)
        k = self.rope[0](self.k_proj(x).view([1, length, kv_heads, dim]), positions)
        v = self.v_proj(x).view([1, length, kv_heads, dim])
        k, v = cache.update(k.permute([0, 2, 1, 3]), v.permute([0, 2, 1, 3]), self.layer)  # [1, kv heads, total, dim]
        k, v, total = k.squeeze(0), v.squeeze(0), k.shape[2]
        group = heads // kv_heads  # heads that share keys
        q = q.view([length, kv_heads, group, dim]).permute([1, 2, 0, 3]).contiguous()
        scores = infinicore.matmul(q.view([kv_heads, group * length, dim]), k.permute([0, 2, 1]), alpha=dim**-0.5)
        weights = F.causal_softmax(scores.view([heads, length, total])).view([kv_heads, group * length, total])
        out = infinicore.matmul(weights, v).view([heads, length, dim]).permute([1, 0, 2]).contiguous()
        return self.o_proj(out.view([1, length, heads * dim]))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, **where)
        self.up_proj = nn.Linear(hidden, inner, **where)
        self.down_proj = nn.Linear(inner, hidden, **where)

    def forward(self, x):
        return self.down_proj(F.swiglu(self.up_proj(x), self.gate_proj(x)))


class Layer(nn.Module):
    def __init__(self, layer, rope):
        super().__init__()
        eps = config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=eps, **where)
        self.self_attn = Attention(layer, rope)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=eps, **where)
        self.mlp = MLP()

    def forward(self, x, positions, cache):
        x = x + self.self_attn(self.input_layernorm(x), positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        rope = nn.RoPE(config["max_position_embeddings"], theta, dim, **where)
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"], **where)
        self.layers = nn.ModuleList([Layer(i, rope) for i in range(config["num_hidden_layers"])])
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"], **where)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], **where)

    def forward(self, ids, positions, cache):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, positions, cache)
        last = self.model.norm(x.narrow(1, x.shape[1] - 1, 1).contiguous())
        return self.lm_head(last).view([config["vocab_size"]])


def loaded(model):
    state = load_file(f"{path}/model.safetensors")
    state = {name: infinicore.from_torch(tensor.float()) for name, tensor in state.items()}
    if config.get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def main():
    model = loaded(Llama())
    cache, tokens, past, made = DynamicCache(), prompt, 0, []
    for _ in range(new):
        positions = infinicore.from_list([list(range(past, past + len(tokens)))], dtype=infinicore.int64)
        logits = model(infinicore.from_list([tokens], dtype=infinicore.int64), positions, cache)
        token = int(F.random_sample(logits, 0.0, 1.0, 1, 1.0).to_numpy())
        past += len(tokens)
        assert cache.get_seq_length() == past
        tokens = [token]
        made.append(token)
    print(json.dumps({"name": "ids", "value": made}))


if __name__ == "__main__":
    main()
