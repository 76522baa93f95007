"""Static cache, the newer names: Input by position, past_sequence_lengths, total_sequence_lengths, input_offsets.

python static_newer.py FOLDER PROMPT [NEW_TOKENS]
"""

import json
import sys

import _infinilm
import infinicore
from infinilm.auto_config import AutoConfig
from infinilm.generation.utils import infini_to_numpy
from infinilm.modeling_utils import get_model_state_dict

infinicore.Tensor.to_numpy = infini_to_numpy
path, prompt, new = sys.argv[1], [int(token) for token in sys.argv[2].split(",")], int(sys.argv[3])


class Engine(_infinilm.InferEngine):
    """A caller's own, with attributes that are set before the base is."""

    def __init__(self, path):
        self.path = path
        self.config = AutoConfig.from_pretrained(path)
        self.device = infinicore.device("cpu", 0)
        super().__init__(
            self.config,
            _infinilm.DistConfig([0]),
            self.device._underlying.type,
            _infinilm.StaticKVCacheConfig(1, 128),
        )

    def step(self, tokens, past):
        n = len(tokens)
        longs = lambda values: infinicore.from_list(values, dtype=infinicore.int64)._underlying  # noqa: E731
        given = self.Input(
            longs([tokens]),
            longs([list(range(past, past + n))]),
            longs([past]),
            longs([past + n]),
            longs([0, n]),
            None,
            None,
            temperature=1.0,
            top_k=1,
            top_p=1.0,
        )
        assert (given.temperature, given.top_k, given.top_p) == (1.0, 1, 1.0)
        return infinicore.Tensor(self.forward(given).output_ids).to_numpy().reshape(-1).tolist()


engine = Engine(path)
state = get_model_state_dict(path, device=infinicore.device("cpu"), dtype=engine.config.dtype)
for name, tensor in state.items():
    engine.load_param(name, tensor._underlying)
past, tokens, made = 0, prompt, []
for _ in range(new):
    found = engine.step(tokens, past)
    past, tokens = past + len(tokens), found
    made += found
print(json.dumps({"name": "ids", "value": made}))
# The whole prompt in pieces of three, over the cache: chunks of one request.
engine.reset_cache(_infinilm.StaticKVCacheConfig(1, 128))
for start in range(0, len(prompt), 3):
    found = engine.step(prompt[start : start + 3], start)
print(json.dumps({"name": "in pieces", "value": found}))
cache = engine.get_cache_config()
print(json.dumps({"name": "cache", "value": [cache.max_batch_size(), cache.max_cache_len()]}))
