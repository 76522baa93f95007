"""What torch_infini.compat.infinilm.InferEngine refuses, each in a sentence, and that nothing has changed then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini.compat.infinilm.infer_engine import GenerationConfig, InferEngine
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

Engine = _infinilm.InferEngine
LENGTH = 12  # of a row of the static cache
BLOCKS, SIZE = 6, 4  # of the paged one


def config(**changes: Any) -> Any:
    values = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "attention_bias": False,
    }
    return _infinilm.LlamaConfig(**{**values, **changes})


def engine_with(cache: Any = None, **changes: Any) -> Any:
    """An engine with random parameters."""
    engine = Engine(config(**changes), cache_config=cache)
    for name, slot in Llama(config(**changes).to_model()).slots().items():
        engine.load_param(name, torch.randn(slot.shape))
    return engine


@pytest.fixture(scope="module")
def static() -> Any:
    """Two rows; the first has three tokens."""
    engine = engine_with(_infinilm.StaticKVCacheConfig(2, LENGTH))
    engine.forward(Engine.Input(torch.ones(1, 3).long(), cache_lengths=torch.tensor([0])))
    return engine


@pytest.fixture(scope="module")
def paged() -> Any:
    return engine_with(_infinilm.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=SIZE))


def refusal(error: type[Exception], call: Any, where: str = ".forward") -> str:
    """The sentence without its beginning."""
    with pytest.raises(error) as raised:
        call()
    start = f"infinilm.InferEngine{where}: "
    assert str(raised.value).startswith(start)
    return str(raised.value).removeprefix(start)


STATIC: dict[str, Any] = {"input_ids": [[5, 6], [7, 8]], "position_ids": [[0, 1], [0, 1]], "cache_lengths": [0, 0]}
NEWER = {"cache_lengths": None, "past_sequence_lengths": [0, 0]}
STATIC_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": None}, "input_ids must be given, got None"),
    "one dimension": ({"input_ids": [5, 6]}, "input_ids must have shape [any, any], got [2]"),
    "floats": ({"input_ids": [[0.5]]}, "input_ids must be int64 or int32, got float32"),
    "too many rows": (
        {"input_ids": [[1]] * 3, "position_ids": None, "cache_lengths": [0, 0, 0]},
        "input_ids must have 1 to 2 rows (max_batch_size), none of them empty, got [3, 1]",
    ),
    "an empty row": (
        {"input_ids": torch.zeros(2, 0).long()},
        "input_ids must have 1 to 2 rows (max_batch_size), none of them empty, got [2, 0]",
    ),
    "a token below 0": ({"input_ids": [[5, -1], [7, 8]]}, "input_ids must be tokens from 0 to 49, got -1"),
    "a token beyond": ({"input_ids": [[5, 6], [7, 50]]}, "input_ids must be tokens from 0 to 49, got 50"),
    "positions of another shape": (
        {"position_ids": [[0, 1]]},
        "position_ids must have shape [2, 2], got [1, 2]",
    ),
    "a position beyond": (
        {"position_ids": [[0, 1], [0, 32]]},
        "position_ids must be positions from 0 to 31, got 32",
    ),
    "a position below 0": (
        {"position_ids": [[-1, 0], [0, 1]]},
        "position_ids must be positions from 0 to 31, got -1",
    ),
    "lengths of other rows": ({"cache_lengths": [0]}, "cache_lengths must have shape [2], got [1]"),
    "no past": (
        {"cache_lengths": None, "position_ids": None},
        "cache_lengths must be given where position_ids are not, got None",
    ),
    "a past below 0": ({"cache_lengths": [0, -1]}, "cache_lengths must be at least 0, got -1"),
    "a past that is not there": (
        {"cache_lengths": [4, 0]},
        "cache_lengths must be at most the tokens that the cache has of that row, got 4",
    ),
    "another row's past": (
        {**NEWER, "past_sequence_lengths": [0, 1]},
        "past_sequence_lengths must be at most the tokens that the cache has of that row, got 1",
    ),
    "two pasts": (
        {"past_sequence_lengths": [0, 0]},
        "past_sequence_lengths must be None where cache_lengths are given, got both",
    ),
    "more new tokens than columns": (
        {"input_lengths": [3, 1]},
        "input_lengths must leave each row at most 2 new tokens, the columns of input_ids, got 3",
    ),
    "a total beyond the columns": (
        {**NEWER, "total_sequence_lengths": [2, 3]},
        "total_sequence_lengths must leave each row at most 2 new tokens, the columns of input_ids, got 3",
    ),
    "no new token": ({"input_lengths": [0, 2]}, "input_lengths must leave each row at least one new token, got 0"),
    "a total below the past": (
        {**NEWER, "total_sequence_lengths": [-1, 2]},
        "total_sequence_lengths must leave each row at least one new token, got -1",
    ),
    "lengths that disagree": (
        {"input_lengths": [2, 2], "total_sequence_lengths": [2, 1]},
        "total_sequence_lengths must leave as many new tokens as input_lengths, got 1",
    ),
    "offsets that begin elsewhere": (
        {**NEWER, "input_offsets": [1, 2, 4]},
        "input_offsets must begin with 0, got 1",
    ),
    "offsets of other rows": ({**NEWER, "input_offsets": [0, 2]}, "input_offsets must have shape [3], got [2]"),
    "a full row": (
        {"input_ids": [[1] * 10], "position_ids": None, "cache_lengths": [3]},
        f"total_sequence_lengths must be at most max_cache_len, {LENGTH}, got 13",
    ),
    "blocks": ({"block_tables": [[0], [1]]}, "block_tables must be None for a static cache, got one"),
    "slots": ({"slot_mapping": [0, 1, 2, 3]}, "slot_mapping must be None for a static cache, got one"),
    "a temperature below 0": ({"temperature": -0.5}, "temperature must be finite and at least 0, got -0.5"),
    "no temperature": (
        {"temperature": float("nan")},
        "temperature must be finite and at least 0, got nan",
    ),
    "temperatures of other rows": (
        {"temperature": [1.0, 1.0, 1.0]},
        "temperature must be a number or one for each of 2 rows, got [1.0, 1.0, 1.0]",
    ),
    "half a token": ({"top_k": 2.5}, "top_k must be an integer or one for each of 2 rows, got 2.5"),
    "a word": ({"top_k": "all"}, "top_k must be an integer or one for each of 2 rows, got 'all'"),
    "a share below 0": ({"top_p": [0.5, -1.0]}, "top_p must be at least 0, got [0.5, -1.0]"),
}
PAGED: dict[str, Any] = {
    "input_ids": [[5, 6, 7, 8, 9]],
    "position_ids": [0, 1, 2, 0, 1],
    "past_sequence_lengths": [0, 0],
    "total_sequence_lengths": [3, 2],
    "input_offsets": [0, 3, 5],
    "block_tables": [[4, -1], [2, -1]],
    "slot_mapping": [16, 17, 18, 8, 9],
}
PAGED_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": None}, "input_ids must be given, got None"),
    "an empty row": ({"input_ids": torch.zeros(1, 0).long()}, "input_ids must have at least one token, got [1, 0]"),
    "two rows of tokens": ({"input_ids": [[1, 2], [3, 4]]}, "input_ids must have shape [any], got [2, 2]"),
    "a token beyond": ({"input_ids": [[5, 6, 7, 8, 50]]}, "input_ids must be tokens from 0 to 49, got 50"),
    "no tables": ({"block_tables": None}, "block_tables must be given for a paged cache, got None"),
    "tables without rows": (
        {"block_tables": torch.zeros(0, 2).long()},
        "block_tables must have at least one row, got [0, 2]",
    ),
    "a table of one dimension": ({"block_tables": [4, 2]}, "block_tables must have shape [any, any], got [2]"),
    "a block beyond": (
        {"block_tables": [[4, -1], [6, -1]], "slot_mapping": None},
        "block_tables must name blocks from 0 to 5, got 6",
    ),
    "a block that is missing": (
        {"block_tables": [[-1, 4], [2, -1]]},
        "block_tables must name blocks from 0 to 5, got -1",
    ),
    "too few blocks": (
        {"past_sequence_lengths": [6, 0], "total_sequence_lengths": [9, 2]},
        "total_sequence_lengths must be at most 8, what a row of block_tables has room for, got 9",
    ),
    "a slot beyond": (
        {"slot_mapping": [16, 17, 24, 8, 9]},
        "slot_mapping must be slots of the cache, from 0 to 23, got 24",
    ),
    "a slot below 0": (
        {"slot_mapping": [16, 17, -1, 8, 9]},
        "slot_mapping must be slots of the cache, from 0 to 23, got -1",
    ),
    "a slot of another block": (
        {"slot_mapping": [16, 17, 19, 8, 9]},
        "slot_mapping must be where block_tables have each new token, got 19",
    ),
    "slots of other tokens": ({"slot_mapping": [16, 17]}, "slot_mapping must have shape [5], got [2]"),
    "two rows in one block": (
        {"block_tables": [[4], [4]], "slot_mapping": None},
        "block_tables must give each new token a slot of its own, got rows that share one",
    ),
    "positions of other tokens": ({"position_ids": [0, 1]}, "position_ids must have shape [5], got [2]"),
    "a position beyond": (
        {"position_ids": [0, 1, 2, 0, 40]},
        "position_ids must be positions from 0 to 31, got 40",
    ),
    "offsets that end elsewhere": (
        {"input_offsets": [0, 3, 4], "total_sequence_lengths": None},
        "input_offsets must add up to the 5 tokens of input_ids, got 4",
    ),
    "offsets that fall": (
        {"input_offsets": [0, 6, 5], "total_sequence_lengths": None},
        "input_offsets must leave each row at least one new token, got -1",
    ),
    "offsets and totals that disagree": (
        {"total_sequence_lengths": [2, 3]},
        "total_sequence_lengths must leave as many new tokens as input_offsets, got 2",
    ),
    "rows without lengths": (
        {"input_offsets": None, "total_sequence_lengths": None},
        "input_offsets must be given for more than one row (or input_lengths), got None",
    ),
    "no past": (
        {"past_sequence_lengths": None, "total_sequence_lengths": None, "position_ids": None},
        "past_sequence_lengths must be given where position_ids are not, got None",
    ),
}


def input_of(base: dict[str, Any], changes: dict[str, Any]) -> Any:
    def made(value: Any) -> Any:
        return torch.tensor(value) if isinstance(value, list) else value

    values = {**base, **changes}
    sampling = {name: values.pop(name) for name in ("temperature", "top_k", "top_p") if name in values}
    return Engine.Input(**{name: made(value) for name, value in values.items()}, **sampling)


@pytest.mark.parametrize("case", STATIC_ERRORS)
def test_static_inputs(static: Any, case: str) -> None:
    changes, message = STATIC_ERRORS[case]
    assert refusal(ValueError, lambda: static.forward(input_of(STATIC, changes))) == message


@pytest.mark.parametrize("case", PAGED_ERRORS)
def test_paged_inputs(paged: Any, case: str) -> None:
    changes, message = PAGED_ERRORS[case]
    assert refusal(ValueError, lambda: paged.forward(input_of(PAGED, changes))) == message


def test_the_inputs_themselves_are_right(static: Any, paged: Any) -> None:
    assert static.forward(input_of(STATIC, {})).output_ids.shape == (2, 1)
    assert static.forward(input_of(STATIC, NEWER)).output_ids.shape == (2,)
    assert paged.forward(input_of(PAGED, {})).output_ids.shape == (2,)
    older = {name: None for name in PAGED if name.endswith(("_sequence_lengths", "_offsets"))}
    older |= {"cache_lengths": [0, 0], "input_lengths": [3, 2]}
    assert paged.forward(input_of(PAGED, older)).output_ids.shape == (2, 1)


def test_what_is_refused_changes_nothing() -> None:
    engine = engine_with(_infinilm.StaticKVCacheConfig(2, LENGTH))
    engine.forward(input_of(STATIC, {}))
    keys = lambda: engine._rank.cache.keys[:, :, :, :2]  # behind them there is nothing yet
    before = keys().clone()
    for changes in ({"top_k": "all"}, {"input_ids": [[1, 2], [3, 99]]}):
        refusal(ValueError, lambda changes=changes: engine.forward(input_of(STATIC, changes)))
    assert torch.equal(keys(), before)
    engine.forward(input_of(STATIC, {"cache_lengths": [2, 2]}))  # both rows are still there


def test_other_kinds(static: Any) -> None:
    ids = torch.tensor([[1]])
    assert refusal(TypeError, lambda: static.forward({"input_ids": ids})) == (
        "input must be an InferEngine.Input, got dict"
    )
    assert refusal(TypeError, lambda: static.forward(Engine.Input([[1]]))) == (
        "input_ids must be an infinicore or a torch tensor, or carry one as _underlying, got list"
    )
    one = lambda: Engine.Input(ids, cache_lengths=torch.tensor([0]))
    for seed in ([1, 2], ["x"], 1.5):
        assert refusal(ValueError, lambda seed=seed: static.forward(one(), seed=seed)) == (
            f"seed must be an integer or one for each of 1 rows, got {seed!r}"
        )
    message = "arguments must be those of its documentation, got input_id, topk"
    assert refusal(ValueError, lambda: Engine.Input(input_id=ids, topk=3), ".Input") == message


def test_parameters() -> None:
    engine = Engine(config())
    name = "model.layers.0.self_attn.k_proj.weight"
    load = lambda name, tensor: lambda: engine.load_param(name, tensor)
    assert refusal(ValueError, load("model.layers.0.self_attn.k_proj.wieght", torch.ones(2)), ".load_param") == (
        "name must be a parameter of the model, such as model.layers.0.self_attn.k_proj.weight, "
        "model.layers.0.self_attn.v_proj.weight, model.layers.0.self_attn.q_proj.weight, "
        "got 'model.layers.0.self_attn.k_proj.wieght'"
    )
    assert refusal(ValueError, load(name, torch.ones(32, 16)), ".load_param") == (
        f"{name} must have shape [16, 32], got [32, 16]"
    )
    assert refusal(ValueError, load(name, torch.ones(16, 32).int()), ".load_param") == (
        f"{name} must be of a floating dtype, got torch.int32"
    )
    assert refusal(TypeError, load(name, [1.0]), ".load_param") == (
        f"{name} must be an infinicore or a torch tensor, or carry one as _underlying, got list"
    )
    assert refusal(TypeError, load(5, torch.ones(2)), ".load_param") == "name must be a string, got int"
    # An untied head is a parameter like others.
    assert "lm_head.weight" in engine.state_dict()[0]


def test_missing_parameters() -> None:
    engine = Engine(config())
    input = lambda: Engine.Input(torch.tensor([[1]]), cache_lengths=torch.tensor([0]))
    parameters = {name: torch.randn(tensor.shape) for name, tensor in engine.state_dict()[0].items()}
    names = sorted(parameters)
    assert len(names) == 12
    engine.load_param(names[0], parameters[names[0]])
    assert refusal(RuntimeError, lambda: engine.forward(input())) == (
        f"all parameters must have been loaded, got none for {', '.join(names[1:11])} and 1 more"
    )
    for name, tensor in parameters.items():
        if name != "model.norm.weight":
            engine.load_param(name, tensor)
    assert refusal(RuntimeError, lambda: engine.forward(input())) == (
        "all parameters must have been loaded, got none for model.norm.weight"
    )
    engine.load_param("model.norm.weight", torch.ones(32))
    assert engine.forward(input()).output_ids.shape == (1, 1)


@pytest.mark.parametrize("top_k", (1, 50))
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_logits_that_are_not_finite(bad: float, top_k: int) -> None:
    engine = engine_with()
    torch.from_dlpack(engine.state_dict()[0]["lm_head.weight"])[7] = bad
    input = Engine.Input(torch.tensor([[1]]), cache_lengths=torch.tensor([0]), top_k=top_k)
    for seed in (None, 1):
        with pytest.raises(RuntimeError, match="logits"):
            engine.forward(input, seed=seed)


def test_construction() -> None:
    assert refusal(TypeError, lambda: Engine({"hidden_size": 4}), "") == "config must be a LlamaConfig, got dict"
    assert refusal(TypeError, lambda: Engine(config(), 2), "") == "distributed_config must be a DistConfig, got int"
    assert refusal(TypeError, lambda: Engine(config(), cache_config=16), "") == (
        "cache_config must be a CacheConfig, got int"
    )
    assert refusal(ValueError, lambda: Engine(config(), device_type=2), "").startswith("device_type must be cpu")
    assert refusal(ValueError, lambda: Engine(config(_dtype="int8")), "") == (
        "dtype must be float32, bfloat16 or float16, got 'int8'"
    )


def test_caches() -> None:
    class Other(_infinilm.CacheConfig):
        pass

    engine = engine_with(_infinilm.StaticKVCacheConfig(1, LENGTH))
    reset = lambda config: lambda: engine.reset_cache(config)
    assert refusal(TypeError, reset(Other()), "") == (
        "cache_config must be a StaticKVCacheConfig or a PagedKVCacheConfig, got Other"
    )
    block = 2 * 1 * 1 * 16 * 16 * 4  # keys and values, layers, kv heads, columns, tokens, bytes
    assert refusal(ValueError, reset(_infinilm.PagedKVCacheConfig(block - 1)), "") == (
        f"max_kv_memory_bytes must be at least {block}, those of one block over all layers (give a number of blocks as "
        f"num_blocks=), got {block - 1}"
    )
    assert refusal(TypeError, reset("static"), "") == "cache_config must be a CacheConfig, got str"
    for blocks in (2**30, 2**60):
        config = _infinilm.PagedKVCacheConfig(num_blocks=blocks, block_size=2**20)
        assert refusal(MemoryError, reset(config), "").startswith(
            f"cache_config must be one that fits into memory, got {config}: "
        )
    # What was refused is not the config, and the engine goes on.
    assert engine.get_cache_config().max_cache_len() == LENGTH
    input = Engine.Input(torch.tensor([[1]]), cache_lengths=torch.tensor([0]))
    assert engine.forward(input).output_ids.shape == (1, 1)
    engine.forward(Engine.Input(torch.tensor([[1]]), cache_lengths=torch.tensor([1])))


def test_generate(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must have a config.json"):
        InferEngine(tmp_path)
    model = random_model("llama")
    model.config.save_pretrained(tmp_path)
    engine = InferEngine(tmp_path)
    parameters = model.state_dict()
    engine.load_param("lm_head.weight", parameters.pop("lm_head.weight"))
    with pytest.raises(RuntimeError, match=r"generate: all parameters must have been loaded, got none for model.embed"):
        engine.generate([[1, 2]])
    for name, tensor in parameters.items():
        engine.load_param(name, tensor)
    assert len(engine.generate([[1, 2]], GenerationConfig(3))) == 3
    model.save_pretrained(tmp_path)
    engine = InferEngine.from_pretrained(tmp_path, cache_config=_infinilm.StaticKVCacheConfig(2, 16))
    for prompt, message in (
        ([], r"input_ids\[1\] must have 1 to 15 tokens.*, got 0"),
        ([5] * 16, r"input_ids\[1\] must have 1 to 15 tokens.*, got 16"),
        ([5, 320], r"input_ids\[1\] must be token ids from 0 to 319, got 320"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([[1, 2], prompt])
    with pytest.raises(ValueError, match="temperature must be"):
        engine.generate([[1, 2]], GenerationConfig(temperature=-1.0))
    assert engine.generate([]) == []
    torch.from_dlpack(engine.state_dict()[0]["model.embed_tokens.weight"])[7] = float("nan")
    with pytest.raises(RuntimeError, match="logits must be below .infinity and not NaN"):
        engine.generate([[1, 2], [1, 7]])
