"""Bad input as callers of InfiniLM meet it, each by its exception and its sentence; the engine serves on afterwards.

python bad_input.py FOLDER PROMPT SCRATCH_FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import infinicore
from infinilm import LLM, AutoLlamaModel, SamplingParams
from infinilm.auto_config import AutoConfig
from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.infer_engine import GenerationConfig, InferEngine
from infinilm.lib import _infinilm
from infinilm.modeling_utils import load_model_state_dict_by_file
from safetensors.torch import load_file, save_file

path, prompt, scratch = sys.argv[1], [int(token) for token in sys.argv[2].split(",")], Path(sys.argv[3])
greedy = GenerationConfig(max_new_tokens=4, top_k=1)


def longs(values):
    return infinicore.from_list(values, dtype=infinicore.int64)


def folder(name, change_config=None, change_tensors=None):
    made = scratch / name
    made.mkdir()
    config = json.loads((Path(path) / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, **(change_config or {})}))
    tensors = load_file(f"{path}/model.safetensors")
    if change_tensors is not None:
        change_tensors(tensors)
    save_file(tensors, made / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(path) / file, made)
    return str(made)


said = {}


def refused(name, call):
    try:
        call()
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
    else:
        said[name] = None


other = folder("other", {"model_type": "mamba"})
missing = folder("missing", change_tensors=lambda tensors: tensors.pop("model.norm.weight"))
surplus = folder("surplus", change_tensors=lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()))
engine = InferEngine(path, cache_config=StaticKVCacheConfig(2, 32))
load_model_state_dict_by_file(engine, path, dtype=engine.dtype)
llm = LLM(path, device="cpu", dtype="float32", max_batch_size=2, num_blocks=16)
settings = SamplingParams(max_tokens=4)
for kind, model in (("type", other), ("missing", missing), ("surplus", surplus)):
    refused(f"{kind}: llm", lambda model=model: LLM(model, device="cpu", dtype="float32"))
    refused(f"{kind}: auto model", lambda model=model: AutoLlamaModel.from_pretrained(model))
    if kind != "type":
        refused(f"{kind}: loading", lambda model=model: load_model_state_dict_by_file(engine, model))
refused("type: config", lambda: AutoConfig.from_pretrained(other))

n = len(prompt)
places = list(range(n))
refused("rows", lambda: engine(longs([prompt] * 3), position_ids=longs([places] * 3)))
refused("row's length", lambda: engine(longs([prompt * 33]), position_ids=longs([list(range(33 * n))])))
refused(
    "lengths",
    lambda: engine(
        longs([prompt]), position_ids=longs([places]), past_kv_lengths=longs([0]), total_kv_lengths=longs([n + 1])
    ),
)
engine.reset_cache(PagedKVCacheConfig(4, 16))


def paged(tables, **more):
    settings = {"past_kv_lengths": longs([0]), "total_kv_lengths": longs([n]), "input_offsets": longs([0, n]), **more}
    return engine(longs([prompt]), position_ids=longs(places), block_tables=longs(tables), **settings)


refused("block beyond", lambda: paged([[4]]))
refused("block below", lambda: paged([[-1]]))
refused("offsets", lambda: paged([[0]], input_offsets=longs([0, n - 1])))
refused("slots", lambda: paged([[0]], slot_mapping=longs([40 + i for i in range(n)])))


class Stop(Exception):
    pass


def stop(hook_name, tensor, layer_idx):
    raise Stop(f"{hook_name} {layer_idx}")


hooks = _infinilm.HookRegistry()
hooks.register_hook("mlp", stop)
engine.register_hooks(hooks)
refused("hook", lambda: paged([[0]]))
hooks.clear()
refused("no token", lambda: engine.generate(longs([[]]), greedy))
refused("token", lambda: engine.generate(longs([[1 << 20]]), greedy))
refused("too long", lambda: llm.generate([prompt * 64], settings))
refused("setting", lambda: llm.generate([prompt], SamplingParams(top_p=-1.0)))

after = {
    "forward": [int(paged([[2]]).to_numpy()[0])],
    "generate": [int(step.to_numpy()[0]) for step in engine.generate(longs([prompt]), greedy)],
    "llm": llm.generate([prompt] * 5, settings)[4].outputs[0].token_ids,  # more than max_batch_size: they wait
}
print(json.dumps({"name": "said", "value": said}))
print(json.dumps({"name": "after", "value": after}))
