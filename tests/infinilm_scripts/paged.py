"""The paged cache, the documentation's names: a budget in bytes, cache_lengths and input_lengths, unequal lengths.

python paged.py --model_path FOLDER --prompt "1,2;3,4,5"
"""

import argparse
import json

import infinicore
from infinilm.auto_config import AutoConfig
from infinilm.lib import _infinilm
from safetensors.torch import load_file

parser = argparse.ArgumentParser()
parser.add_argument("--model_path", required=True)
parser.add_argument("--prompt", required=True)
parser.add_argument("--max_new_tokens", type=int, default=16)
args = parser.parse_args()

BLOCK = 8
prompts = [[int(token) for token in row.split(",")] for row in args.prompt.split(";")]
config = AutoConfig.from_pretrained(args.model_path)
cache_config = _infinilm.PagedKVCacheConfig(max_kv_memory_bytes=8 << 20, block_size=BLOCK)
assert (cache_config.max_kv_memory_bytes(), cache_config.block_size()) == (8 << 20, BLOCK)
assert isinstance(cache_config, _infinilm.CacheConfig)
engine = _infinilm.InferEngine(config, _infinilm.DistConfig(), infinicore.device("cpu")._underlying.type, cache_config)
for name, param in load_file(f"{args.model_path}/model.safetensors").items():
    engine.load_param(name, infinicore.from_torch(param)._underlying)

# A block table each: request r has the blocks r, r + R, r + 2 R, ..., so that neighbours are another's.
R = len(prompts)
longest = max(map(len, prompts)) + args.max_new_tokens
tables = [[r + R * i for i in range(-(-longest // BLOCK))] for r in range(R)]


def tensor(values):
    return infinicore.from_list(values, dtype=infinicore.int64)._underlying


def forward(new, cached):
    """One step for all requests: new[r] behind cached[r] tokens of the cache."""
    slots, positions = [], []
    for row, tokens, length in zip(tables, new, cached):
        for position in range(length, length + len(tokens)):
            positions.append(position)
            slots.append(row[position // BLOCK] * BLOCK + position % BLOCK)
    used = [row[: -(-(length + len(tokens)) // BLOCK)] for row, tokens, length in zip(tables, new, cached)]
    width = max(map(len, used))
    output = engine.forward(
        _infinilm.InferEngine.Input(
            input_ids=tensor([[token for tokens in new for token in tokens]]),
            position_ids=tensor(positions),
            cache_lengths=tensor(cached),
            input_lengths=tensor([len(tokens) for tokens in new]),
            block_tables=tensor([row + [-1] * (width - len(row)) for row in used]),
            slot_mapping=tensor(slots),
            top_k=1,
        )
    )
    return [int(token) for token in output.output_ids.to_numpy()[:, 0]]


cached, step, made = [0] * R, prompts, [[] for _ in prompts]
for _ in range(args.max_new_tokens):
    tokens = forward(step, cached)
    cached = [length + len(row) for length, row in zip(cached, step)]
    step = [[token] for token in tokens]
    for row, token in zip(made, tokens):
        row.append(token)
print(json.dumps({"name": "ids", "value": made}))
