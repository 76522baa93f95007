"""A caller's own engine class with a generate of its own, and hooks that watch what layers give meanwhile.

python hooks.py FOLDER PROMPT NEW_TOKENS
"""

import json
import sys

import infinicore
from infinilm.auto_config import AutoConfig
from infinilm.generation.utils import infini_to_numpy
from infinilm.lib import _infinilm
from infinilm.modeling_utils import get_model_state_dict

path, prompt, new = sys.argv[1], [int(token) for token in sys.argv[2].split(",")], int(sys.argv[3])


class Traced(_infinilm.InferEngine):
    def __init__(self, path):
        self.model_path, self.calls, self.lengths, self.best = path, {}, {}, []
        self.config = AutoConfig.from_pretrained(path)
        super().__init__(
            self.config,
            _infinilm.DistConfig(1),
            infinicore.device("cpu", 0)._underlying.type,
            _infinilm.StaticKVCacheConfig(max_batch_size=1, max_cache_len=128),
        )
        for name, tensor in get_model_state_dict(path, dtype=self.config.dtype).items():
            self.load_param(name, tensor._underlying)

    def watch(self, hook_name, tensor, layer_idx):
        assert isinstance(tensor, infinicore.Tensor)
        values = infini_to_numpy(tensor)
        self.calls[hook_name] = self.calls.get(hook_name, 0) + 1
        if hook_name == "lm_head":
            self.best.append(int(values[-1].argmax()))
        elif len(values) == len(prompt):  # the first pass
            self.lengths[f"{hook_name} {layer_idx}"] = [float((row**2).sum() ** 0.5) for row in values]

    def generate(self, input_ids, max_new_tokens=16):
        past, made = 0, []
        for _ in range(max_new_tokens):
            length = input_ids.shape[1]
            positions = infinicore.from_list([list(range(past, past + length))], dtype=infinicore.int64)
            cached = infinicore.from_list([past], dtype=infinicore.int64)
            given = self.Input(
                input_ids._underlying,
                position_ids=positions._underlying,
                cache_lengths=cached._underlying,
                temperature=1.0,
                top_k=1,
                top_p=1.0,
            )
            input_ids, past = self.forward(given).output_ids, past + length
            made.append(int(input_ids.to_numpy()[0, 0]))
        return made


engine, ids = Traced(path), infinicore.from_list([prompt], dtype=infinicore.int64)
hooks = _infinilm.HookRegistry()
for name in ("layer", "norm", "lm_head"):
    hooks.register_hook(name, engine.watch)
assert hooks.has_hooks()
engine.register_hooks(hooks)
watched = engine.generate(ids, new)
calls = dict(engine.calls)
hooks.clear()
engine.reset_cache(engine.get_cache_config())
plain = engine.generate(ids, new)
assert engine.calls == calls, "a hook was called that had been removed"
for name, value in (("watched", watched), ("plain", plain), ("calls", calls)):
    print(json.dumps({"name": name, "value": value}))
print(json.dumps({"name": "best", "value": engine.best}))
print(json.dumps({"name": "lengths", "value": engine.lengths}))
