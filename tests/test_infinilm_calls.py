"""infinilm.lib._infinilm as scripts call it: infinicore tensors in and out, InfiniLM's positional Input,
engines without weights, and what scripts get wrong.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.rounding import greedy_tokens
from torch_infini.compat import infinicore
from torch_infini.compat.infinicore.lib import _infinicore
from torch_infini.compat.infinilm.auto_config import AutoConfig
from torch_infini.compat.infinilm.cache.sized_in_blocks import PagedKVCacheConfig
from torch_infini.compat.infinilm.convert import as_device
from torch_infini.compat.infinilm.infer_engine import InferEngine as FolderEngine
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 6
ROWS = [[5, 6, 7, 8], [9, 3, 2, 1]]
Input = _infinilm.InferEngine.Input


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = random_model("llama", num_hidden_layers=2)
    found.folder = tmp_path_factory.mktemp("model")
    found.save_pretrained(found.folder)
    return found


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    """Its cache is that of whichever test resets it."""
    made = _infinilm.InferEngine(AutoConfig.from_pretrained(model.folder), cache_config=static())
    for name, parameter in model.state_dict().items():
        made.load_param(name, infinicore.from_torch(parameter)._underlying)
    return made


def static() -> Any:
    return _infinilm.StaticKVCacheConfig(2, 16)


def paged() -> Any:
    return PagedKVCacheConfig(12, 4)


def ints(values: Any) -> Any:
    return infinicore.from_list(values, dtype=infinicore.int64)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    return tokens[0, len(prompt) :].tolist()


KINDS: dict[str, Callable[[Any], Any]] = {
    "infinicore": lambda tensor: tensor,
    "_infinicore": lambda tensor: tensor._underlying,
    "torch": torch.from_dlpack,
}


# Tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", (static, paged))
def test_seven_positional_arguments(cache: Any, kind: str, model: Any, engine: Any) -> None:
    """A prefill of two rows and its decode steps, as a script writes them, in each kind of tensor."""
    engine.reset_cache(cache())
    as_kind, tokens, past, steps = KINDS[kind], ROWS, 0, []
    while len(steps) < NEW:
        width = len(tokens[0])
        places = [list(range(past, past + width))] * 2
        lengths = [past] * 2, [past + width] * 2, [0, width, 2 * width]
        if cache is static:
            input = Input(*map(as_kind, map(ints, (tokens, places, *lengths))), top_k=1)
        else:
            tables = [[0, 2, 4, -1], [1, 3, 5, -1]]
            slots = [table[at // 4] * 4 + at % 4 for table in tables for at in places[0]]
            flat = [sum(tokens, [])], sum(places, []), *lengths, tables, slots
            input = Input(*map(as_kind, map(ints, flat)))
        output = engine.forward(input).output_ids
        assert type(output) is (torch.Tensor if kind == "torch" else infinicore.Tensor)
        assert list(output.shape) == [2] and output.dtype == (torch.int64 if kind == "torch" else infinicore.int64)
        found = infinicore.from_torch(output) if kind == "torch" else output
        assert infinicore.Tensor(found).to_numpy().tolist() == infinicore.Tensor(found._underlying).to_numpy().tolist()
        tokens = [[token] for token in found.to_numpy().tolist()]
        steps.append(tokens)
        past += width
    assert [[step[row][0] for step in steps] for row in range(2)] == [greedy(model, row) for row in ROWS]


def test_attributes_of_input_and_output() -> None:
    names = (
        "input_ids",
        "position_ids",
        "past_sequence_lengths",
        "total_sequence_lengths",
        "input_offsets",
        "block_tables",
        "slot_mapping",
    )
    given = [ints([i]) for i in range(7)]
    input = Input(*given, temperature=0.5, top_k=7, top_p=0.25)
    assert [getattr(input, name) for name in names] == given
    assert (input.temperature, input.top_k, input.top_p) == (0.5, 7, 0.25)
    with pytest.raises(TypeError, match="positional"):
        Input(*given, ints([7]))
    older = ("cache_lengths", "input_lengths")
    for name in (*names, *older):
        assert getattr(Input(**{name: given[0]}), name) is given[0]
        empty = Input()
        assert getattr(empty, name) is None
        setattr(empty, name, given[1])
        assert getattr(empty, name) is given[1]
    with pytest.raises(ValueError, match=r"arguments must be those of its documentation, got max_tokens, topk"):
        Input(given[0], max_tokens=3, topk=4)
    assert [*inspect.signature(Input).parameters][:7] == [*names]
    output = _infinilm.InferEngine.Output()
    assert output.output_ids is None
    output.output_ids = given[0]
    assert output.output_ids is given[0] and _infinilm.InferEngine.Output(given[1]).output_ids is given[1]


def test_tensors_of_other_layouts(model: Any, engine: Any) -> None:
    """Strided, of 32 bits, of both kinds in one call; input_ids decide on the result's kind."""
    engine.reset_cache(static())
    padded = infinicore.from_torch(torch.tensor([[5, 6, 7, 8, -7], [9, 3, 2, 1, -7]], dtype=torch.int32))
    past = torch.zeros(4, dtype=torch.int64)[::2]
    output = engine.forward(Input(padded.narrow(1, 0, 4), past_sequence_lengths=past)).output_ids
    assert output.to_numpy().tolist() == [greedy(model, row)[0] for row in ROWS]
    older = Input(torch.tensor(ROWS), cache_lengths=ints([0, 0]), input_lengths=ints([4, 3]), top_k=1)
    output = engine.forward(older).output_ids
    assert output.tolist() == [[greedy(model, row)[0]] for row in (ROWS[0], ROWS[1][:3])]


def test_nothing_is_copied(model: Any) -> None:
    """state_dict has the memory that passes read; load_param takes memory of the caller's without keeping it."""
    engine = _infinilm.InferEngine(AutoConfig.from_pretrained(model.folder), cache_config=static())
    left = []
    for name, parameter in model.state_dict().items():
        param = infinicore.from_torch(parameter.clone())
        left.append(weakref.ref(param))
        engine.load_param(name, param)
        del param
    gc.collect()
    assert not any(ref() is not None for ref in left)
    (state,) = engine.state_dict()
    assert all(type(tensor) is infinicore.Tensor for tensor in state.values())
    model_names = model.state_dict()
    assert all(torch.equal(torch.from_dlpack(tensor), model_names[name]) for name, tensor in state.items())
    weights = {p.data_ptr(): p for p in engine._rank.model.parameters()}
    head, norm = state["lm_head.weight"], state["model.norm.weight"]
    assert head.data_ptr() in weights and norm.data_ptr() in weights
    input = lambda: Input(ints(ROWS), past_sequence_lengths=ints([0, 0]))
    before = engine.forward(input()).output_ids
    head.copy_(infinicore.zeros(head.shape, dtype=head.dtype, device="cpu"))
    assert engine.forward(input()).output_ids.to_numpy().tolist() == [0, 0]
    tokens = before.to_numpy().tolist()
    ref = weakref.ref(engine._rank.model)
    del engine, weights
    gc.collect()
    assert ref() is None
    assert before.to_numpy().tolist() == tokens == [greedy(model, row)[0] for row in ROWS]
    assert torch.from_dlpack(norm).equal(model_names["model.norm.weight"])  # what was given lives on


def test_inputs_may_be_used_again(model: Any, engine: Any) -> None:
    engine.reset_cache(paged())
    ids, past, tables = ints([ROWS[0]]), ints([0]), ints([[3, 1]])
    expected = greedy(model, ROWS[0])[0]
    for _ in range(20):
        assert engine.forward(Input(ids, None, past, block_tables=tables)).output_ids.to_numpy().tolist() == [expected]
    assert (ids.to_numpy().tolist(), tables.to_numpy().tolist()) == ([ROWS[0]], [[3, 1]])


@pytest.mark.parametrize("kind", ("infinicore", "torch"))
def test_hooks_get_tensors_of_the_inputs_kind(kind: str, engine: Any) -> None:
    engine.reset_cache(static())
    seen: list[Any] = []
    registry = _infinilm.HookRegistry()
    registry.register_hook("layer", lambda name, tensor, layer: seen.append((type(tensor), list(tensor.shape), layer)))
    engine.register_hooks(registry)
    engine.forward(Input(KINDS[kind](ints(ROWS)), past_sequence_lengths=ints([0, 0])))
    engine.register_hooks(None)
    expected = torch.Tensor if kind == "torch" else infinicore.Tensor
    assert seen == [(expected, [8, 64], layer) for layer in (0, 1)]


# Devices


def test_the_cpu_as_infinicore_names_it(model: Any) -> None:
    device = infinicore.device("cpu")
    kinds = _infinicore.Device.Type
    for value in (device, device._underlying, device._underlying.type, kinds.CPU, int(kinds.CPU), device.type, None):
        assert as_device("here", value) == torch.device("cpu"), value
    engine = _infinilm.InferEngine(AutoConfig.from_pretrained(model.folder), device_type=kinds.CPU)
    assert engine.state_dict()[0]["model.norm.weight"].device == device
    for value in (kinds.CAMBRICON, kinds.QY, kinds.COUNT, infinicore.device("npu")):
        with pytest.raises(ValueError, match="here: device_type must be cpu"):
            as_device("here", value)


def test_the_current_device_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    nvidia = _infinicore.Device(_infinicore.Device.Type.NVIDIA, 1)
    monkeypatch.setattr(infinicore, "get_device", lambda: nvidia)
    assert as_device("here", None) == torch.device("cuda:1")


# Weights


def test_no_weight_at_all(model: Any, tmp_path: Path) -> None:
    """One warning, weights that are the same each time, norms of ones; a parameter may still be loaded."""
    config = AutoConfig.from_pretrained(model.folder)
    tokens = []
    for _ in range(2):
        engine = _infinilm.InferEngine(config, cache_config=static())
        input = Input(ints(ROWS), past_sequence_lengths=ints([0, 0]))
        with pytest.warns(UserWarning) as caught:
            tokens.append(engine.forward(input).output_ids.to_numpy().tolist())
        assert len(caught) == 1
        assert str(caught[0].message).startswith(
            "infinilm.InferEngine.forward: no parameter has been loaded, so all are random numbers: "
            "lm_head.weight, model.embed_tokens.weight, "
        ) and str(caught[0].message).endswith(" and 11 more")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert engine.forward(input).output_ids.to_numpy().tolist() == tokens[-1]
            engine.load_param("lm_head.weight", torch.zeros(engine.state_dict()[0]["lm_head.weight"].shape))
            assert engine.forward(input).output_ids.to_numpy().tolist() == [0, 0]
    assert tokens[0] == tokens[1]
    state = {name: torch.from_dlpack(tensor) for name, tensor in engine.state_dict()[0].items()}
    assert state["model.norm.weight"].equal(torch.ones(64))
    down, up = (state[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("down", "up"))
    for weight in (down, up):
        n = weight.numel()
        assert weight.mean().abs() < 5 * 0.02 / n**0.5 and abs(weight.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5
    assert not torch.equal(down.flatten(), up.flatten())


def test_biases_without_weights(tmp_path: Path) -> None:
    random_model("qwen2", num_hidden_layers=1).config.save_pretrained(tmp_path)
    engine = FolderEngine(tmp_path)
    with pytest.warns(UserWarning, match=r"forward: no parameter has been loaded"):
        engine.forward(Input(torch.tensor([[1]]), cache_lengths=torch.tensor([0])))
    bias = engine.state_dict()[0]["model.layers.0.self_attn.q_proj.bias"]
    assert not torch.from_dlpack(bias).any()


def test_some_weights_are_missing(model: Any) -> None:
    engine = _infinilm.InferEngine(AutoConfig.from_pretrained(model.folder), cache_config=static())
    engine.load_param("model.norm.weight", infinicore.ones([64], dtype=infinicore.float32, device="cpu"))
    with pytest.raises(RuntimeError, match=r"forward: all parameters must have been loaded, got none for lm_head\.w"):
        engine.forward(Input(ints(ROWS), past_sequence_lengths=ints([0, 0])))


# Bad input: the engine goes on


def test_folders(model: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"model_type must be one of llama, mistral, qwen2, qwen3.*, got 'gpt2'"):
        FolderEngine(tmp_path)
    with pytest.raises(ValueError, match="name must be a parameter of the model, such as .*, got 'model.surplus'"):
        FolderEngine(model.folder).load_param("model.surplus", ints([1]))
    model.config.save_pretrained(tmp_path)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    few = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    for tensors, name in ((few, "model.norm.weight"), ({**whole, "model.surplus": torch.ones(2)}, "model.surplus")):
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=name):
            FolderEngine.from_pretrained(tmp_path)
    safetensors.torch.save_file(whole, tmp_path / "model.safetensors")
    right = FolderEngine.from_pretrained(tmp_path).forward(ints(ROWS[:1]), past_kv_lengths=ints([0]))
    assert right.to_numpy().tolist() == greedy(model, ROWS[0])[:1]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more rows than the cache holds": (
        static,
        {"input_ids": [[1]] * 3, "past_sequence_lengths": [0] * 3},
        "input_ids must have 1 to 2 rows (max_batch_size), none of them empty, got [3, 1]",
    ),
    "a block out of range": (
        paged,
        {"input_ids": [[1]], "past_sequence_lengths": [0], "block_tables": [[12]]},
        "block_tables must name blocks from 0 to 11, got 12",
    ),
    "lengths that contradict": (
        static,
        {
            "input_ids": ROWS,
            "past_sequence_lengths": [0, 0],
            "total_sequence_lengths": [4, 5],
            "input_offsets": [0, 4, 8],
        },
        "total_sequence_lengths must leave as many new tokens as input_offsets, got 5",
    ),
    "vocabularies that contradict": (
        static,
        {"input_ids": ROWS, "past_sequence_lengths": [0, 0], "cache_lengths": [0, 0]},
        "past_sequence_lengths must be None where cache_lengths are given, got both",
    ),
    "tokens as floats": (static, {"input_ids": [[0.5]]}, "input_ids must be int64 or int32, got float32"),
    "tokens as booleans": (static, {"input_ids": [[True]]}, "input_ids must be int64 or int32, got bool"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(case: str, model: Any, engine: Any) -> None:
    cache, values, message = WRONG[case]
    engine.reset_cache(cache())
    input = Input(**{name: infinicore.from_torch(torch.tensor(value)) for name, value in values.items()})
    with pytest.raises(ValueError) as error:
        engine.forward(input)
    assert str(error.value) == f"infinilm.InferEngine.forward: {message}"
    more = {} if cache is static else {"block_tables": ints([[3]])}
    right = Input(ints(ROWS[:1]), past_sequence_lengths=ints([0]), **more)
    assert engine.forward(right).output_ids.to_numpy().tolist() == greedy(model, ROWS[0])[:1]


def test_tensors_that_hold_nothing(engine: Any) -> None:
    engine.reset_cache(static())
    x = infinicore.ones([2], dtype=infinicore.float32, device="cpu")
    with infinicore.graph():
        y = x + x
    with pytest.raises(RuntimeError, match="holds nothing before the graph's first run"):
        engine.load_param("model.norm.weight", y)
    half = _infinicore.empty([64], _infinicore.DataType.C16, infinicore.device("cpu")._underlying, False)
    with pytest.raises(ValueError, match=r"load_param: model.norm.weight must be of a dtype that torch has: "):
        engine.load_param("model.norm.weight", half)


def test_two_ranks(model: Any) -> None:
    """A hook's exception leaves ranks in step; random weights are those of one rank; a worker that ends is named."""

    class Cache(PagedKVCacheConfig):
        """Of a script: the other rank cannot import it."""

    config = AutoConfig.from_pretrained(model.folder)
    caches = (paged(), Cache(12, 4))
    engines = [
        _infinilm.InferEngine(config, _infinilm.DistConfig(i)._underlying, None, cache)
        for i, cache in enumerate(caches, 1)
    ]

    def step(engine: Any, tokens: list[int], past: int) -> list[int]:
        input = Input(ints([tokens]), None, ints([past]), block_tables=ints([[3, 1]]))
        return engine.forward(input).output_ids.to_numpy().tolist()

    found = []
    for engine in engines:
        with pytest.warns(UserWarning, match="no parameter has been loaded") as caught:
            found.append(step(engine, ROWS[0], 0))
        assert len(caught) == 1
    assert found[0] == found[1]
    two = engines[1]
    assert two.get_cache_config() is caches[1]
    two.reset_cache(Cache(max_kv_memory_bytes=1 << 20))
    two.reset_cache(caches[1])
    (whole,), parts = ([{n: torch.from_dlpack(x) for n, x in s.items()} for s in e.state_dict()] for e in engines)
    assert torch.cat([part["lm_head.weight"] for part in parts]).equal(whole["lm_head.weight"])

    class Stop(OSError):
        """Of a kind that errors of the connection to a worker have too."""

    calls: list[int] = []

    def stop(name: str, tensor: Any, layer: int) -> None:
        calls.append(layer)
        raise Stop

    registry = _infinilm.HookRegistry()
    registry.register_hook("self_attn", stop)
    two.register_hooks(registry)
    for tokens, past in ((ROWS[0], 0), (found[0], 4), (ROWS[1], 0)):
        with pytest.raises(Stop):
            step(two, tokens, past)
    assert calls == [0, 0, 0]
    registry.clear()
    registry.register_hook("mlps", stop)  # refused before the workers hear of the pass
    with pytest.raises(ValueError, match="HookRegistry: name must be one of"):
        step(two, ROWS[0], 0)
    registry.clear()
    for name, parameter in model.state_dict().items():
        two.load_param(name, parameter)
    assert step(two, ROWS[0], 0) + step(two, greedy(model, ROWS[0])[:1], 4) == greedy(model, ROWS[0])[:2]
    (worker,) = two._rank.workers._processes
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank"):
            step(two, ROWS[0], 0)
    assert step(engines[0], ROWS[0], 0) == found[0]
