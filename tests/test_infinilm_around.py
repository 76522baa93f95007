"""infinilm around its low-level engine, as scripts import and call it: tokens are transformers', in every form.

infer_engine, auto_config, models.llama, modeling_utils, generation, cache_utils, configuration_utils; and the names of
transformers 4 that `python -m torch_infini run` provides.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_infini import compat, infinicore
from torch_infini._import_hooks import after_import
from torch_infini.commands import transformers4
from torch_infini.demo import MODEL
from torch_infini.infinilm import cache_utils, configuration_utils, modeling_utils
from torch_infini.infinilm.auto_config import AutoConfig
from torch_infini.infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from torch_infini.infinilm.generation.utils import GenerationMixin, infini_to_numpy
from torch_infini.infinilm.infer_engine import GenerationConfig, InferEngine
from torch_infini.infinilm.models.llama import AutoLlamaModel, LlamaForCausalLM
from torch_infini.testing import greedy_tokens
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 6}, "qwen2": {}, "qwen3": {}}
PROMPTS = [[5, 6, 7, 8, 9], [300, 2, 2, 17, 40], [9, 200, 31, 8, 77]]
NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, top_k=1)


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """transformers' tokens behind one prompt."""
    ids = torch.tensor([prompt])
    tokens = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model folder, and the tokens behind PROMPTS."""
    return _saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return _saved("llama", tmp_path_factory.mktemp("llama"))


def _saved(name: str, folder: Path) -> tuple[Path, list[list[int]]]:
    model = random_model(name, **FAMILIES[name])
    model.save_pretrained(folder)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # or a mixed-up row would not be seen
    return folder, expected


def loaded(folder: Path, cache: Any = None) -> InferEngine:
    """An engine as scripts make it."""
    engine = InferEngine(str(folder), device=infinicore.device("cpu", 0), cache_config=cache)
    modeling_utils.load_model_state_dict_by_file(engine, str(folder), dtype=engine.dtype)
    return engine


def infini(values: Any) -> infinicore.Tensor:
    return infinicore.from_list(values, dtype=infinicore.int64)


def by_row(steps: list[Any]) -> list[list[int]]:
    return [list(tokens) for tokens in zip(*(step.to_numpy().tolist() for step in steps), strict=True)]


# Imports and signatures

IMPORTS = (
    "from infinilm import AutoConfig, AutoLlamaModel",
    "from infinilm.auto_config import AutoConfig",
    "from infinilm.cache_utils import Cache, DynamicCache, StaticCache",
    "from infinilm.configuration_utils import PretrainedConfig",
    "from infinilm.generation import GenerationMixin",
    "from infinilm.generation.utils import GenerationMixin, infini_to_numpy",
    "from infinilm.infer_engine import GenerationConfig, InferEngine",
    "from infinilm.modeling_utils import load_model_state_dict_by_file, load_model_state_dict_by_tensor",
    "from infinilm.modeling_utils import check_parameters, get_model_state_dict",
    "from infinilm.models.llama import AutoLlamaModel, LlamaConfig, LlamaForCausalLM",
)


@pytest.fixture
def aliases() -> Iterator[None]:
    before = set(sys.modules)
    compat.install()
    yield
    compat.uninstall()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("infinicore", "infinilm"):
            del sys.modules[name]


@pytest.mark.skipif(importlib.util.find_spec("infinilm") is not None, reason="infinilm is installed")
def test_imports(aliases: None) -> None:
    scope: dict[str, Any] = {}
    for line in IMPORTS:
        exec(line, scope)
    assert scope["InferEngine"] is InferEngine and scope["GenerationMixin"] is GenerationMixin


def names_of(function: Any) -> list[str]:
    """Parameters as `name`, `name=default` or `*, name`; without self."""
    shown, keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            shown, keywords = [*shown, "*"], True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return shown


@pytest.mark.parametrize(
    ("function", "expected"),
    (
        (AutoConfig.from_pretrained, "model_path"),
        (
            InferEngine.forward,
            "input_ids, *, position_ids=None, past_kv_lengths=None, total_kv_lengths=None, input_offsets=None, "
            "block_tables=None, slot_mapping=None, temperature=None, top_k=None, top_p=None, seed=None",
        ),
        (
            InferEngine.generate,
            "input_ids, generation_config=None, *, _measure_and_log_time=False, paged_block_size=16",
        ),
        (InferEngine.load_state_dict, "state_dict, strict=None"),
        (InferEngine.reset_cache, "cache_config=None"),
        (
            GenerationConfig,
            "max_new_tokens=None, temperature=1.0, top_k=50, top_p=1.0, eos_token_id=None, stop_on_eos=True, seed=None",
        ),
        (
            AutoLlamaModel.from_pretrained,
            "model_path, device=None, dtype=None, backend='cpp', distributed_config=None, cache_config=None",
        ),
        (modeling_utils.load_model_state_dict_by_file, "model, model_path, dtype=None"),
        (modeling_utils.load_model_state_dict_by_tensor, "model, model_path, dtype=None"),
        (modeling_utils.get_model_state_dict, "model_path, device=None, dtype=None"),
        (modeling_utils.check_parameters, "model_keys, already_loaded_keys"),
        (infini_to_numpy, "infini_tensor"),
        (cache_utils.DynamicCache.update, "key_states, value_states, layer_idx, cache_kwargs=None"),
    ),
)
def test_signatures(function: Any, expected: str) -> None:
    assert ", ".join(names_of(function)) == expected


# InferEngine

CACHES = (
    None,
    StaticKVCacheConfig(max_batch_size=3, max_cache_len=32),
    StaticKVCacheConfig(max_batch_size=1),
    PagedKVCacheConfig(num_blocks=12, block_size=4),
)


def test_generate(family: tuple[Path, list[list[int]]]) -> None:
    """In all caches, for all kinds of input_ids; a second call and one after reset_cache are like the first."""
    folder, expected = family
    engine = loaded(folder)
    for cache in CACHES:
        engine.reset_cache(cache)
        assert engine.enable_paged_attn == isinstance(cache, PagedKVCacheConfig)
        for ids in (infini(PROMPTS), infini(PROMPTS)._underlying, PROMPTS):
            steps = engine.generate(ids, GREEDY)
            assert all(type(step) is infinicore.Tensor and step.shape == [3] for step in steps)
            assert by_row(steps) == expected
    steps = engine.generate(torch.tensor(PROMPTS), GREEDY, paged_block_size=8)
    assert all(type(step) is Tensor and step.dtype == torch.int64 for step in steps)
    assert torch.stack(steps, 1).tolist() == expected


@pytest.mark.parametrize("kind", ("infinicore", "torch"))
def test_a_loop_of_forward_with_a_static_cache(kind: str, family: tuple[Path, list[list[int]]]) -> None:
    folder, expected = family
    make: Any = infini if kind == "infinicore" else torch.tensor
    engine = loaded(folder, StaticKVCacheConfig(max_batch_size=3, max_cache_len=32))
    ids, past, steps = make(PROMPTS), 0, []
    for _ in range(NEW):
        new = ids.shape[1]
        tokens = engine(
            ids,
            position_ids=make([list(range(past, past + new))] * 3),
            past_kv_lengths=make([past] * 3),
            total_kv_lengths=make([past + new] * 3),
        )
        assert isinstance(tokens, infinicore.Tensor if kind == "infinicore" else Tensor) and list(tokens.shape) == [3]
        steps.append(infini_to_numpy(tokens).tolist() if kind == "infinicore" else tokens.tolist())
        ids, past = tokens.view([3, 1]), past + new
    assert [list(row) for row in zip(*steps, strict=True)] == expected


def test_a_loop_of_forward_with_a_paged_cache(family: tuple[Path, list[list[int]]]) -> None:
    folder, expected = family
    size = 4
    engine = loaded(folder, PagedKVCacheConfig(num_blocks=12, block_size=size))
    tables = [[2, 0, 5, 11], [1, 3, 10, 4], [9, 8, 7, 6]]
    rows, past, steps = PROMPTS, 0, []
    for _ in range(NEW):
        new = len(rows[0])
        places = list(range(past, past + new))
        tokens = engine.forward(
            infini([sum(rows, [])]),
            position_ids=infini(places * 3),
            past_kv_lengths=infini([past] * 3),
            total_kv_lengths=infini([past + new] * 3),
            input_offsets=infini([0, new, 2 * new, 3 * new]),
            block_tables=infini([[*table, -1] for table in tables]),
            slot_mapping=infini([table[at // size] * size + at % size for table in tables for at in places]),
            temperature=1.0,
            top_k=1,
            top_p=1.0,
        )
        assert tokens.shape == [3]
        steps.append(tokens.to_numpy().tolist())
        rows, past = [[token] for token in steps[-1]], past + new
    assert [list(row) for row in zip(*steps, strict=True)] == expected


def test_forward_takes_an_input_too(llama: tuple[Path, list[list[int]]]) -> None:
    """Without lengths and settings it is greedy; an Input has the defaults of its vocabulary, and comes alone."""
    folder, expected = llama
    engine = loaded(folder, StaticKVCacheConfig(3, 32))
    places = infini([list(range(5))] * 3)
    assert engine(infini(PROMPTS), position_ids=places).to_numpy().tolist() == [row[0] for row in expected]
    input = engine.Input(infini(PROMPTS), places, top_k=1)
    assert engine.forward(input).output_ids.to_numpy().tolist() == [[row[0]] for row in expected]
    with pytest.raises(TypeError, match="forward: an Input must come alone, got top_k beside it"):
        engine.forward(input, top_k=1)
    with pytest.raises(ValueError, match="past_sequence_lengths must be at most the tokens that the cache has"):
        engine(infini(PROMPTS), past_kv_lengths=infini([0, 0, 9]))


def test_rows_end_one_by_one(llama: tuple[Path, list[list[int]]]) -> None:
    """A row that ended repeats its end token until the last one ends."""
    folder, expected = llama
    engine = loaded(folder)
    end = expected[1][2]
    until = [row[: row.index(end) + 1] if end in row else row for row in expected]
    assert len({len(row) for row in until}) > 1
    width = max(map(len, until))
    ended = [row + row[-1:] * (width - len(row)) for row in until]
    settings = GenerationConfig(max_new_tokens=NEW, top_k=1, eos_token_id=end)
    assert by_row(engine.generate(infini(PROMPTS), settings)) == ended
    assert len(engine.generate(infini(PROMPTS[1:2]), settings)) == len(until[1])
    settings.stop_on_eos = False
    assert by_row(engine.generate(infini(PROMPTS), settings)) == expected
    engine.config.eos_token_id = end  # generate takes the model's, which is the folder's
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected
    config = json.loads((folder / "config.json").read_text())
    other = folder / "ends"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": [end, 319]}))
    second = InferEngine(other)
    modeling_utils.load_model_state_dict_by_tensor(second, folder)
    assert second.config.eos_token_id == [end, 319]
    assert by_row(second.generate(infini(PROMPTS), GREEDY)) == ended


def test_generate_draws_by_its_seed(llama: tuple[Path, list[list[int]]]) -> None:
    engine = loaded(llama[0])
    hot = {"max_new_tokens": NEW, "temperature": 20.0, "top_k": 0}
    draw = lambda rows, **more: by_row(engine.generate(infini(rows), GenerationConfig(**hot, **more)))
    same = draw(PROMPTS[:1] * 2, seed=1)
    assert draw(PROMPTS[:1], seed=1) == same[:1] != draw(PROMPTS[:1], seed=2) and same[0] != same[1]
    assert draw(PROMPTS[:1]) != draw(PROMPTS[:1])


def test_parameters_that_change_between_calls(llama: tuple[Path, list[list[int]]]) -> None:
    """No keys of earlier parameters are used."""
    engine = loaded(llama[0])
    prompt = infini([[7] * 80])  # some blocks
    before = by_row(engine.generate(prompt, GREEDY))
    assert by_row(engine.generate(prompt, GREEDY)) == before
    (state,) = engine.state_dict()
    name = "model.layers.0.self_attn.v_proj.weight"
    engine.load_param(name, torch.from_dlpack(state[name]) * -3)
    fresh = loaded(llama[0])
    fresh.load_param(name, engine.state_dict()[0][name])
    after = by_row(engine.generate(prompt, GREEDY))
    assert after == by_row(fresh.generate(prompt, GREEDY)) != before


def test_times_are_printed(llama: tuple[Path, list[list[int]]], capfd: pytest.CaptureFixture[str]) -> None:
    engine = loaded(llama[0])
    number = r"\d+\.\d+"
    engine.generate(infini(PROMPTS), GREEDY)
    assert capfd.readouterr().out == ""
    engine.generate(infini(PROMPTS), GREEDY, _measure_and_log_time=True)
    engine.generate(infini(PROMPTS), GenerationConfig(max_new_tokens=1), _measure_and_log_time=True)
    lines = capfd.readouterr().out.splitlines()
    prefill = rf"generate: 3 rows; prefill 15 tokens in {number} ms \({number} tokens/s\)"
    decode = rf"; decode 21 tokens in {number} ms \({number} tokens/s, {number} ms a step\)"
    assert len(lines) == 2 and re.fullmatch(prefill + decode, lines[0]) and re.fullmatch(prefill, lines[1])


def test_attributes(llama: tuple[Path, list[list[int]]]) -> None:
    engine = InferEngine(llama[0], dtype=infinicore.bfloat16, cache_config=StaticKVCacheConfig(2, 16))
    assert (engine.dtype, engine.config.dtype) == (infinicore.bfloat16,) * 2
    assert engine.device == infinicore.device("cpu", 0)
    assert (engine.use_cache, engine.enable_paged_attn) == (False, False)
    engine.use_cache = True
    assert engine.config.hidden_size == SMALL["hidden_size"]
    (state,) = engine.state_dict()
    assert engine.state_dict_keyname() == list(state) and state["lm_head.weight"].dtype == infinicore.bfloat16


def test_generate_refuses(llama: tuple[Path, list[list[int]]]) -> None:
    engine = loaded(llama[0], StaticKVCacheConfig(2, 16))
    name = "torch_infini.infinilm.infer_engine.InferEngine.generate: "
    for ids, error, message in (
        (torch.tensor([1, 2]), ValueError, f"{name}input_ids must be int64 or int32 [rows, length], got int64 [2]"),
        (
            torch.tensor([[0.5]]),
            ValueError,
            f"{name}input_ids must be int64 or int32 [rows, length], got float32 [1, 1]",
        ),
        ("text", TypeError, f"{name}input_ids must be a tensor or a list of token ids for each row, got 'text'"),
        ([[1], []], ValueError, "torch_infini.Engine: prompt must have at least one token, got none (prompt 1)"),
        ([[1, 320]], ValueError, "torch_infini.Engine: prompt must be token ids from 0 to 319, got 320 (prompt 0)"),
    ):
        with pytest.raises(error) as raised:
            engine.generate(ids, GREEDY)
        assert str(raised.value) == message
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == llama[1]  # three rows, one behind the other
    assert engine.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="prompt must be shorter than 16 tokens"):
        engine.generate([[1] * 16], GREEDY)
    engine.reset_cache(StaticKVCacheConfig(2, 32))
    assert len(engine.generate([[1] * 16], GREEDY)) == NEW


# models.llama and modeling_utils


def test_auto_llama_model(llama: tuple[Path, list[list[int]]]) -> None:
    folder, expected = llama
    for backend in ("cpp", "python"):
        model = AutoLlamaModel.from_pretrained(str(folder), device=infinicore.device("cpu"), backend=backend)
        assert isinstance(model, LlamaForCausalLM) and by_row(model.generate(infini(PROMPTS), GREEDY)) == expected
    with pytest.raises(ValueError, match="backend must be 'cpp' or 'python', got 'rust'"):
        AutoLlamaModel.from_pretrained(folder, backend="rust")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    modeling_utils.load_model_state_dict_by_file(model, folder)
    assert by_row(model.generate(infini(PROMPTS), GREEDY)) == expected
    half = AutoLlamaModel.from_pretrained(folder, dtype=infinicore.float16)
    assert half.dtype == infinicore.float16 and len(half.generate(infini(PROMPTS), GREEDY)) == NEW


def test_parameters_come_after_the_engine(llama: tuple[Path, list[list[int]]]) -> None:
    """Without any there are random ones and one warning, as benchmarks want that skip loading."""
    folder, expected = llama
    engine = InferEngine(folder)
    with pytest.warns(UserWarning, match=r"InferEngine\.generate: no parameter has been loaded") as warned:
        rows = [by_row(engine.generate(infini(PROMPTS), GREEDY)) for _ in range(2)]
    assert len(warned) == 1 and rows[0] == rows[1] != expected
    modeling_utils.load_model_state_dict_by_file(engine, folder)
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected
    config = AutoConfig.from_pretrained(folder)
    other = LlamaForCausalLM(config, dtype="bfloat16")
    assert (other.dtype, config.dtype) == (infinicore.bfloat16, infinicore.float32)
    other.load_param("model.norm.weight", torch.ones(SMALL["hidden_size"]))
    with pytest.raises(RuntimeError, match=r"all parameters must have been loaded, got none for lm_head\.weight"):
        other.generate(infini(PROMPTS), GREEDY)


def test_an_unknown_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for door in (AutoConfig.from_pretrained, InferEngine, AutoLlamaModel.from_pretrained):
        with pytest.raises(ValueError, match="model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"):
            door(tmp_path)


def test_a_folder_in_several_files(llama: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Into an engine and into a module, in both ways; and as a dict of tensors for load_param and load_state_dict."""
    folder, expected = llama
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weight_map = {}
    for i in range(3):
        part = names[i::3]
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    state = modeling_utils.get_model_state_dict(tmp_path, device=infinicore.device("cpu"), dtype=infinicore.float32)
    assert state.keys() == tensors.keys()
    engines = [InferEngine(tmp_path) for _ in range(4)]
    modeling_utils.load_model_state_dict_by_file(engines[0], tmp_path)
    modeling_utils.load_model_state_dict_by_tensor(engines[1], tmp_path, dtype=torch.float32)
    for name, tensor in state.items():
        engines[2].load_param(name, tensor._underlying)
    assert engines[3].load_state_dict(state, strict=True) == ([], [])
    for engine in engines:
        assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected
    for load in (modeling_utils.load_model_state_dict_by_file, modeling_utils.load_model_state_dict_by_tensor):
        module = Holder(tensors)
        load(module, tmp_path)
        assert all(torch.equal(torch.from_dlpack(module.kept[name]), tensors[name]) for name in names)


class Holder:
    """As much of an infinicore.nn.Module as is loaded into."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        self.kept = {name: infinicore.from_torch(torch.zeros_like(tensor)) for name, tensor in like.items()}

    def state_dict(self) -> dict[str, infinicore.Tensor]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, infinicore.Tensor], strict: bool = True) -> None:
        assert not strict
        for name, tensor in state.items():
            self.kept[name].copy_(tensor)


def test_a_tied_head(tmp_path: Path) -> None:
    random_model("llama-biases-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    state = modeling_utils.get_model_state_dict(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(torch.from_dlpack(state["lm_head.weight"]), embedding.bfloat16())
    module = Holder(tensors | {"lm_head.weight": embedding})
    modeling_utils.load_model_state_dict_by_file(module, tmp_path, dtype=infinicore.float32)
    assert torch.equal(torch.from_dlpack(module.kept["lm_head.weight"]), embedding)


def test_what_loading_refuses(llama: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = llama
    tensors = load_file(folder / "model.safetensors")
    engine = loaded(folder)
    with pytest.raises(ValueError, match="dtype must be that of the engine, float32, got bfloat16"):
        modeling_utils.load_model_state_dict_by_file(engine, folder, dtype=infinicore.bfloat16)
    with pytest.raises(FileNotFoundError, match="must hold safetensors files"):
        modeling_utils.load_model_state_dict_by_file(engine, tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    changed = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file({**changed, "model.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; surplus: model\.extra"):
        modeling_utils.load_model_state_dict_by_file(engine, tmp_path)
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; surplus: model\.extra"):
        InferEngine(tmp_path)
    with pytest.raises(RuntimeError, match=r"missing: model\.norm\.weight; unexpected: model\.extra"):
        modeling_utils.load_model_state_dict_by_file(module := Holder(tensors), tmp_path)
    assert not any(torch.from_dlpack(tensor).any() for tensor in module.kept.values())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    for model in (engine, module):
        with pytest.raises(ValueError, match="must be a whole safetensors file"):
            modeling_utils.load_model_state_dict_by_tensor(model, tmp_path)
    modeling_utils.check_parameters(tensors, list(tensors))
    with pytest.raises(RuntimeError, match=r"check_parameters: .*; missing: b, c; unexpected: d"):
        modeling_utils.check_parameters(["a", "c", "b"], {"a": 1, "d": 2})
    # An engine's own names.
    for strict in (None, True):
        with pytest.raises(RuntimeError, match="unknown: model.extra"):
            engine.load_state_dict({"model.extra": torch.ones(2)}, strict)
    with pytest.raises(RuntimeError, match="missing: model.norm.weight"):
        engine.load_state_dict({**changed}, strict=True)
    assert engine.load_state_dict(changed) == (["model.norm.weight"], [])
    assert engine.load_state_dict({"model.extra": 0}, strict=False)[1] == ["model.extra"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight must have shape \[64\], got \[3\]"):
        engine.load_state_dict({"model.norm.weight": torch.ones(3)})
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected  # nothing has changed


# cache_utils


@pytest.mark.parametrize("kind", ("infinicore", "torch"))
@pytest.mark.parametrize("sequence_dim", (1, 2))
def test_caches(kind: str, sequence_dim: int) -> None:
    """Tokens come in odd numbers; a growing cache moves, a fixed one does not."""
    make: Any = infinicore.from_torch if kind == "infinicore" else lambda tensor: tensor
    back: Any = torch.from_dlpack if kind == "infinicore" else lambda tensor: tensor
    config = type("Config", (), {"num_key_value_heads": 3})()
    for cache in (
        cache_utils.DynamicCache(config, sequence_dim=sequence_dim),
        cache_utils.StaticCache(config, 300, sequence_dim=sequence_dim),
    ):
        assert len(cache) == cache.get_seq_length() == cache.get_seq_length(1) == 0
        parts: list[list[tuple[Tensor, Tensor]]] = [[], []]
        places = set()
        for count in (5, 1, 1, 90, 1, 170):
            for layer in (0, 1):
                shape = (2, 3, count) if sequence_dim == 2 else (2, count, 3)
                new = torch.randn(*shape, 8), torch.randn(*shape, 4).bfloat16()
                new = new[0].transpose(0, 3).contiguous().transpose(0, 3), new[1]  # of any strides
                parts[layer].append(new)
                found = cache.update(make(new[0]), make(new[1]), layer)
                for got, want in zip(found, zip(*parts[layer], strict=True), strict=True):
                    assert torch.equal(back(got), torch.cat(want, sequence_dim))
                places.add((layer, found[0].data_ptr()))
        assert len(cache) == 2 and cache.get_seq_length(1) == 268
        assert (len(places) == 2) == isinstance(cache, cache_utils.StaticCache)
        keys, _ = cache[0]
        cache.crop(6)
        assert cache.get_seq_length() == 6 and torch.equal(back(cache[0][0]), back(keys).narrow(sequence_dim, 0, 6))
        cache.crop(-2)
        assert cache.get_seq_length() == 4
        cache.reset()
        assert cache.get_seq_length() == 0 and len(cache) == 2
    assert cache.get_max_cache_shape() == 300 and cache_utils.DynamicCache().get_max_cache_shape() == -1


def test_caches_refuse() -> None:
    config = type("Config", (), {"num_key_value_heads": 3})()
    cache = cache_utils.StaticCache(config, 4)
    keys = torch.ones(2, 3, 3, 8)
    cache.update(keys, keys, 0)
    for states, layer, message in (
        (torch.ones(2, 5, 3, 8), 0, r"key_states must have the config's 3 heads in dimension 1 \(sequence_dim= says"),
        (torch.ones(1, 3, 1, 8), 0, r"new keys or values must have shape \[2, 3, 1, 8\], as those before, got \[1, 3"),
        (torch.ones(2, 3, 2, 8), 0, "a sequence must have at most max_cache_len, 4, tokens, got 5"),
        (keys, 2, "layer_idx must be at most 1, the next layer, got 2"),
        (keys[0], 0, "must have four dimensions, alike but for the last"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(states, states, layer)
    assert cache.get_seq_length() == 3
    for arguments in ({"max_cache_len": 0}, {"max_cache_len": 4, "sequence_dim": 3}):
        with pytest.raises(ValueError, match="StaticCache.__init__: "):
            cache_utils.StaticCache(config, **arguments)


# generation.utils


class Attending(GenerationMixin):
    """One layer of attention over embeddings, with a cache: tokens depend on all that came before."""

    def __init__(self, rows: int = 60, size: int = 16) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(rows, size, generator=draw)
        self.places = torch.randn(200, size, generator=draw)
        self.query = torch.randn(size, size, generator=draw) / 4
        self.head = torch.randn(size, rows, generator=draw)
        self.seen: list[list[int]] = []
        self.config = type("Config", (), {"num_key_value_heads": 1, "eos_token_id": None})()

    def logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        x = self.table[ids] + self.places[positions]
        keys, values = (x[:, None], self.table[ids][:, None])
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        scores = (x @ self.query)[:, None] @ keys.transpose(2, 3)
        past = keys.shape[2] - ids.shape[1]
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(past)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values)[:, 0] @ self.head


class WithCache(Attending):
    """On infinicore tensors."""

    def forward(self, input_ids: Any, position_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert use_cache and isinstance(input_ids, infinicore.Tensor)
        self.seen.append(input_ids.shape)
        return infinicore.from_torch(
            self.logits(torch.from_dlpack(input_ids), torch.from_dlpack(position_ids), past_key_values)
        )


class WithoutCache(Attending):
    """On torch tensors, all of them in every call; the logits of the last token in a tuple."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        self.seen.append(list(input_ids.shape))
        return (self.logits(input_ids, more["position_ids"], None)[:, -1],)


def test_generation_mixin() -> None:
    prompt = [[1, 2, 3], [50, 4, 4]]
    cached, whole = WithCache(), WithoutCache()
    steps = cached.generate(infini(prompt), GREEDY)
    plain = whole.generate(torch.tensor(prompt), top_k=1, max_new_tokens=NEW)
    assert all(isinstance(step, Tensor) for step in plain)
    assert by_row(steps) == torch.stack(plain, 1).tolist()
    assert cached.seen == [[2, 3]] + [[2, 1]] * (NEW - 1) and whole.seen == [[2, 3 + i] for i in range(NEW)]
    ids = torch.tensor(prompt)
    for step in plain:  # by the definition
        expected = whole.logits(ids, torch.arange(ids.shape[1])[None], None)[:, -1].argmax(-1)
        assert torch.equal(step, expected)
        ids = torch.cat((ids, step[:, None]), 1)

    rows = by_row(steps)
    assert len(set(rows[0])) > 2 and rows[0] != rows[1]
    end = rows[0][1]
    tokenizer = type("Tokenizer", (), {"eos_token_id": end})()
    ended = by_row(cached.generate(infini(prompt), GREEDY, tokenizer=tokenizer))
    width = len(ended[0])
    for row, tokens in zip(ended, rows, strict=True):
        until = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert row == (until + until[-1:] * width)[:width]
    assert ended[0][1:] == [end] * (width - 1)
    cached.config.eos_token_id = end
    assert by_row(cached.generate(infini(prompt), GREEDY)) == ended
    assert by_row(cached.generate(infini(prompt), GREEDY, stop_on_eos=False)) == rows


def test_generation_mixin_draws() -> None:
    model = WithoutCache()
    prompt = torch.tensor([[1, 2, 3]])
    draw = lambda **more: torch.stack(model.generate(prompt, max_new_tokens=NEW, temperature=9.0, **more)).tolist()
    assert draw(seed=1) == draw(seed=1) != draw(seed=2) and draw() != draw()
    # Each token is that of its random number.
    generator = torch.Generator().manual_seed(1)
    ids = prompt
    for token in draw(seed=1, top_k=5, top_p=0.9):
        logits = model.logits(ids, torch.arange(ids.shape[1])[None], None)[0, -1]
        number = torch.rand(1, generator=generator).item()
        assert torch.ops.infini.random_sample_given(logits, number, 0.9, 5, 9.0) == token[0]
        ids = torch.cat((ids, torch.tensor([token])), 1)


def test_generation_mixin_refuses() -> None:
    model = WithoutCache()
    with pytest.raises(ValueError, match="max_new_tokens must be given where no end token is known, got None"):
        model.generate(torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"input_ids must be a tensor \[batch, tokens\], not empty, got \[2\]"):
        model.generate(torch.tensor([1, 2]), GREEDY)
    with pytest.raises(TypeError, match="max_tokens"):
        model.generate(torch.tensor([[1]]), max_tokens=3)
    model.forward = lambda input_ids: torch.ones(3)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"forward must give logits \[1, tokens, vocabulary\], got \[3\]"):
        model.generate(torch.tensor([[1]]), GREEDY)


def test_infini_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 4)
    found = infini_to_numpy(infinicore.from_torch(values.T))
    assert found.tolist() == values.T.tolist()
    found[0, 0] = 9
    assert values[0, 0] != 9
    assert infini_to_numpy(infini([1, 2])._underlying).tolist() == [1, 2]
    monkeypatch.setattr(infinicore.Tensor, "to_numpy", infini_to_numpy)  # as scripts do
    assert infini([3]).to_numpy().tolist() == [3]


# configuration_utils


class Config(configuration_utils.PretrainedConfig):
    model_type = "made-up"

    def __init__(self, hidden_size: int = 8, tie_word_embeddings: bool = False, **kwargs: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


def test_pretrained_config(tmp_path: Path) -> None:
    config = Config(hidden_size=16, torch_dtype="bfloat16", eos_token_id=[2, 3], extra={"a": 1})
    assert (config.hidden_size, config.dtype, config.torch_dtype) == (16, torch.bfloat16, torch.bfloat16)
    assert (config.eos_token_id, config.pad_token_id, config.tie_word_embeddings) == ([2, 3], None, False)
    config.save_pretrained(tmp_path / "made")
    again = Config.from_pretrained(tmp_path / "made", hidden_size=4)
    assert again.name_or_path == "" and again != config
    again.update({"hidden_size": 16})
    assert again == config and again.to_dict()["extra"] == {"a": 1} and again.model_type == "made-up"
    again.extra["a"] = 2
    assert config.extra == {"a": 1} and again != config
    with pytest.raises(FileNotFoundError, match="must have a config.json"):
        Config.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype must be torch's or the name of one, got 'int9'"):
        Config(dtype="int9")
    plain = configuration_utils.PretrainedConfig.from_pretrained(MODEL)
    written = json.loads((Path(MODEL) / "config.json").read_text())
    assert (plain.model_type, plain.hidden_size) == (written["model_type"], written["hidden_size"])
    five = configuration_utils.PretrainedConfig(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert five.rope_theta == 5e5


# transformers 4's names


def test_names_of_transformers_4_are_there_for_a_while() -> None:
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

    if hasattr(PreTrainedTokenizerBase, "batch_encode_plus"):
        pytest.skip("transformers 4 has them")
    apply = PreTrainedTokenizerBase.apply_chat_template
    tokenizer, config = AutoTokenizer.from_pretrained(MODEL), AutoConfig.from_pretrained(MODEL)
    messages, template = [{"role": "user", "content": "def"}], "{{ messages[0].content }}"
    with transformers4.names():
        texts = ["def main(", "x"]
        assert tokenizer.batch_encode_plus(texts)["input_ids"] == tokenizer(texts)["input_ids"]
        short = tokenizer.batch_encode_plus(tuple(texts), add_special_tokens=False, max_length=2, truncation=True)
        assert [len(ids) for ids in short["input_ids"]] == [2, 1]
        pair = tokenizer("a", "b")["input_ids"]
        assert tokenizer.encode_plus("a", "b")["input_ids"] == pair
        assert tokenizer.batch_encode_plus([("a", "b"), ("a", "b")])["input_ids"] == [pair] * 2
        assert config.rope_theta == config.rope_parameters["rope_theta"]
        with pytest.raises(AttributeError, match="'LlamaConfig' object has no attribute 'rope_thetas'"):
            config.rope_thetas  # noqa: B018
        assert not hasattr(PretrainedConfig(), "rope_theta")
        ids = tokenizer.apply_chat_template(messages, chat_template=template)
        assert isinstance(ids, list) and ids == tokenizer("def", add_special_tokens=False)["input_ids"]
        encoded = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
        assert encoded["input_ids"] == ids
    assert not hasattr(tokenizer, "batch_encode_plus") and not hasattr(tokenizer, "encode_plus")
    assert not hasattr(config, "rope_theta") and PreTrainedTokenizerBase.apply_chat_template is apply


SCRIPT = """\
import sys
assert "transformers" not in sys.modules
import torch
from transformers import AutoConfig, AutoTokenizer
from infinilm.infer_engine import GenerationConfig, InferEngine
from infinilm.modeling_utils import load_model_state_dict_by_file
import infinicore

path = sys.argv[1]
config = AutoConfig.from_pretrained(path)
model = InferEngine(path, device=infinicore.device("cpu", 0))
load_model_state_dict_by_file(model, path, dtype=model.config.dtype)
assert config.rope_theta == model.config.rope_theta
assert config.torch_dtype == infinicore.utils.to_torch_dtype(model.dtype)
tokenizer = AutoTokenizer.from_pretrained(path)
ids = tokenizer.batch_encode_plus(["def main("])["input_ids"]
output = model.generate(infinicore.from_list(ids), GenerationConfig(max_new_tokens=12, top_k=1))
print([step.to_numpy()[0].item() for step in output])
"""


def test_a_script_for_transformers_4(tmp_path: Path) -> None:
    from torch_infini import LLM, SamplingParams

    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch_infini", "run", str(tmp_path / "script.py"), MODEL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "OMP_NUM_THREADS": "1"})
    (output,) = LLM(MODEL).generate("def main(", SamplingParams.greedy(max_tokens=12))
    assert (done.stdout, done.returncode) == (f"{output.tokens}\n", 0), done.stderr


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after the module's code; looking for it is no import, and what is imported already is called at once."""
    (tmp_path / "around_made_up").mkdir()
    (tmp_path / "around_made_up" / "__init__.py").write_text("")
    (tmp_path / "around_made_up" / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name, finders, calls = "around_made_up.late", list(sys.meta_path), []
    try:
        cancel = after_import(name, lambda module: calls.append("cancelled"))
        after_import(name, lambda module: calls.append(module.value))
        after_import(name, lambda module: calls.append(module.value + 1))
        assert importlib.util.find_spec(name) is not None and calls == []
        cancel()
        module = importlib.import_module(name)
        assert sorted(calls) == [1, 2] and sys.meta_path == finders
        after_import(name, lambda module: calls.append(3))
        cancel()
        importlib.reload(module)
        assert sorted(calls) == [1, 2, 3] and sys.meta_path == finders
    finally:
        sys.meta_path[:] = finders
        for one in ("around_made_up", name):
            sys.modules.pop(one, None)
