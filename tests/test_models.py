"""Llama: logits equal to transformers' for each family, half precision no worse, integer weights, and checkpoints.

Whole prompts, pieces of them and single tokens must give the same; a static cache is a paged one with large blocks.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.rounding import assert_same_but_rounding, sums_of
from torch_infini._core.products import aten_from_set_to
from torch_infini.models import Llama, LlamaConfig, checkpoint
from torch_infini.nn import Batch, KVCache, Linear
from torch_infini.nn.linear import fastest
from torch_infini.testing.checkpoints import MODELS, SMALL, cast, random_model
from torch_infini.weights import quantize

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 70


def batch_of(tokens: list[list[int]], starts: list[int], lengths: int, block_size: int, shuffled: bool) -> Batch:
    """New tokens of some sequences, each with its own `lengths` slots in a cache; blocks in another order."""
    each = -(-lengths // block_size)
    tables = torch.arange(len(tokens) * each).view(len(tokens), each)
    if shuffled:
        tables = torch.randperm(tables.numel(), generator=torch.Generator().manual_seed(0)).view(tables.shape)
    positions = [range(start, start + len(row)) for row, start in zip(tokens, starts, strict=True)]
    slots = [
        int(tables[i, at // block_size]) * block_size + at % block_size for i, row in enumerate(positions) for at in row
    ]
    counts = torch.tensor([len(row) for row in tokens])
    return Batch(
        torch.tensor([token for row in tokens for token in row]),
        torch.tensor([at for row in positions for at in row]),
        torch.tensor(slots),
        tables,
        torch.tensor(starts) + counts,
        None if bool((counts == 1).all()) else torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
    )


def run(
    model: Llama,
    prompts: list[list[int]],
    pieces: list[int],
    block_size: int = 16,
    shuffled: bool = True,
    cache_dtype: torch.dtype | None = None,
    is_long: bool = False,
) -> list[Tensor]:
    """Logits of all tokens of each prompt, computed up to the same places at a time; is_long as RotarySwitch's."""
    length = max(map(len, prompts))
    cache = model.new_cache(len(prompts) * -(-length // block_size), block_size, cache_dtype)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for start, end in zip([0, *pieces], [*pieces, length], strict=True):
        mine = [(i, prompt[start:end]) for i, prompt in enumerate(prompts)]
        batch = batch_of(
            [part for _, part in mine], [min(start, len(p)) for p in prompts], length, block_size, shuffled
        )
        if model.rotary_switch is not None:
            batch = replace(batch, positions=model.rotary_switch.row(batch.positions, is_long))
        parts = model(batch, cache).split([len(part) for _, part in mine])
        for (i, _), part in zip(mine, parts, strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(SMALL["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def saved(tmp_path: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, Any]:
    theirs = random_model(name, dtype, **changes)
    theirs.save_pretrained(tmp_path)
    return tmp_path, theirs


def near(actual: Tensor, expected: Tensor, theirs: Any) -> None:
    """Within what another order of sums makes."""
    assert_same_but_rounding(actual, expected, *sums_of(theirs.config))


@torch.no_grad()
def their_logits(model: Any, prompt: list[int]) -> Tensor:
    return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    folder, theirs = saved(tmp_path, name)
    model = Llama.from_pretrained(folder)
    rows = prompts(LENGTH, 31, 1)
    want = [their_logits(theirs, row) for row in rows]
    for pieces, block_size in (([], 16), ([1], 16), ([30, 31, 64], 5), ([10, 50], LENGTH)):
        for got, expected in zip(run(model, rows, pieces, block_size), want, strict=True):
            near(got, expected, theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_token_by_token(name: str, tmp_path: Path) -> None:
    folder, theirs = saved(tmp_path, name)
    model = Llama.from_pretrained(folder)
    rows = prompts(40, 40)
    for got, row in zip(run(model, rows, list(range(1, 40))), rows, strict=True):
        near(got, their_logits(theirs, row), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "mistral", "qwen2", "qwen3"])
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The error against float64 is at most 1.05 times that of transformers."""
    folder, theirs = saved(tmp_path, name, dtype)
    model = Llama.from_pretrained(folder)
    assert model.dtype == dtype
    rows = prompts(200, 100)
    exact_model = cast(random_model(name, dtype), torch.float64)
    ours, others = 0.0, 0.0
    for got, row in zip(run(model, rows, []), rows, strict=True):
        exact = their_logits(exact_model, row)
        ours += float((got - exact).square().mean())
        others += float((their_logits(theirs, row) - exact).square().mean())
    assert ours**0.5 <= 1.05 * others**0.5


@pytest.mark.parametrize("weights", ["int8", "int4", "group8", "table4"], indirect=True)
@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3"])
def test_integer_weights(name: str, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of a model with the dequantized weights."""
    monkeypatch.setattr(quantize, "MULTIPLIES_INTEGERS", ())
    folder, theirs = saved(tmp_path, name)
    model = Llama.from_pretrained(folder, weights)
    read = {key: slot.read() for key, slot in model.slots().items()}
    state = theirs.state_dict()
    for key, value in read.items():
        assert (
            key.endswith("norm.weight") or key.endswith("bias") or "embed" in key or not torch.equal(value, state[key])
        )
        assert float((value - state[key]).abs().max()) < 0.3 * float(state[key].abs().max())
        state[key].copy_(value)
    if theirs.config.tie_word_embeddings:  # the head has integers, the embedding has not
        theirs.lm_head.weight = torch.nn.Parameter(model.head.dense())
    row = prompts(LENGTH)
    if fastest(weights, torch.float32, "cpu") not in ("group8", "table4"):  # which quantize x always
        near(run(model, row, [])[0], their_logits(theirs, row[0]), theirs)
    monkeypatch.undo()  # x quantized too: close
    assert float((run(model, row, [])[0] - their_logits(theirs, row[0])).square().mean().sqrt()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "mistral", "qwen2-windows", "qwen3"])
def test_int8_cache(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Beside a cache of floats the logits are off by less than 3 %, in prompts and token by token. In float32 where a
    prompt is cut changes less than a tenth of that: its tokens are attended to as they are in the cache, and only last
    bits that make a step of int8 show."""
    folder, _ = saved(tmp_path, name, dtype)
    model = Llama.from_pretrained(folder)
    rows = prompts(LENGTH, 40)
    floats = run(model, rows, [])
    whole = run(model, rows, [], cache_dtype=torch.int8)
    for pieces, block_size in (([30, 31, 64], 5), (list(range(40, LENGTH)), 16)):
        cut = run(model, rows, pieces, block_size, cache_dtype=torch.int8)
        for a, b, c in zip(whole, cut, floats, strict=True):
            if dtype == torch.float32:
                assert (a - b).square().mean() < 0.1**2 * (a - c).square().mean()
            for got in (a, b):
                assert (got - c).float().square().mean().sqrt() < 0.03 * c.float().square().mean().sqrt()
                assert not torch.equal(got, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@aten_from_set_to(None)
def test_bits_with_int8_cache_do_not_depend_on_neighbours(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama", dtype)
    model = Llama.from_pretrained(folder)
    rows, pieces = prompts(130, 104, 115), [100, 101, 102]
    alone = [run(model, [row], pieces, cache_dtype=torch.int8)[0] for row in rows]
    for a, b in zip(alone, run(model, rows, pieces, cache_dtype=torch.int8), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-windows", "qwen3"])
def test_logits_of_the_last_tokens(name: str, cache_dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of all tokens, and the same keys and values for the tokens to come; the last layer is computed of no others
    unless it is to be whole."""
    folder, theirs = saved(tmp_path, name)
    model = Llama.from_pretrained(folder)
    counts: list[int] = []
    model.layers[-1].mlp.register_forward_hook(lambda _, args, y: counts.append(len(y)))
    model.layers[0].mlp.register_forward_hook(lambda _, args, y: counts.append(len(y)))
    tokens = prompts(LENGTH, 31, 1, 2)
    caches = [model.new_cache(4 * -(-(LENGTH + 3) // 16), 16, cache_dtype) for _ in range(3)]
    for cache in caches:
        cache.keys.zero_()
    first = batch_of(tokens, [0] * 4, LENGTH + 3, 16, True)
    next_ = batch_of([[5, 6, 7], [8], [9, 1], [2]], [len(row) for row in tokens], LENGTH + 3, 16, True)
    singles = batch_of([[4], [3], [2], [1]], [0] * 4, LENGTH + 3, 16, True)
    for batch, last in ((first, [69, 100, 101, 103]), (next_, [2, 3, 5, 6]), (singles, [0, 1, 2, 3])):
        n = len(batch.tokens)
        want = model(batch, caches[0])[last]
        assert torch.equal(model(batch, caches[1], last=True, whole=True), want)
        got = model(batch, caches[2], last=True, out=torch.empty(4, model.config.vocab_size))
        near(got, want, theirs)
        assert counts == [n, n, n, n, n, 4]
        counts.clear()
    for made, whole in ((cache.keys, caches[0].keys) for cache in caches[1:]):
        assert torch.equal(made, whole)


@pytest.mark.parametrize("weights", ["dense", "int8", "int4", "group8", "table4"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_neighbours(weights: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama", dtype)
    model = Llama.from_pretrained(folder, weights)
    rows = prompts(LENGTH, 3, 130, 1)
    alone = [run(model, [row], [])[0] for row in rows]
    together = run(model, rows, [])
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)


def test_linear_parts_of_a_weight() -> None:
    """Projections that are loaded one by one, quantized, are those of the whole."""
    weight = torch.randn(300, 128)
    for format in ("int8", "int4", "group8", "table4"):
        whole, parts = (Linear(128, 300, format=format) for _ in range(2))
        whole.load(weight)
        for first in (0, 100, 290):
            parts.load(weight[first : {0: 100, 100: 290, 290: 300}[first]], first)
        assert torch.equal(whole.dense(), parts.dense())
        assert torch.equal(whole.dense(slice(5, 9)), parts.dense()[5:9])
        assert (
            float((whole.dense() - weight).abs().max())
            < {"int8": 0.03, "int4": 0.4, "group8": 0.03, "table4": 0.4}[format]
        )


# ---- checkpoints ----


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def test_sharded(tmp_path: Path) -> None:
    theirs = random_model("qwen3")
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    row = prompts(20)
    got = run(Llama.from_pretrained(tmp_path), row, [])[0]
    near(got, their_logits(theirs, row[0]), theirs)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"must hold the files of its index, model-00001-of-\d+.safetensors missing"
    ):
        Llama.from_pretrained(tmp_path)


def test_spellings_of_transformers_4(tmp_path: Path) -> None:
    folder, theirs = saved(tmp_path, "llama3")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit(folder, rope_parameters="absent", rope_scaling=rope, rope_theta=theta, dtype="absent", torch_dtype="float32")
    row = prompts(LENGTH)
    model = Llama.from_pretrained(folder)
    assert model.config.dtype == torch.float32
    near(run(model, row, [])[0], their_logits(theirs, row[0]), theirs)


def test_what_config_leaves_out(tmp_path: Path) -> None:
    """Entries that are missing stand for the family's defaults."""
    import transformers

    for kind, name in (("Llama", "llama"), ("Mistral", "mistral"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3")):
        theirs = getattr(transformers, f"{kind}Config")()
        ours = LlamaConfig.from_dict({"model_type": name})
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        for entry in (*sizes, *counts, "rms_norm_eps", "tie_word_embeddings"):
            assert getattr(ours, entry) == getattr(theirs, entry), (name, entry)
        assert ours.head_dim == 128
        assert set(ours.windows) == {4096 if name == "mistral" else 0}


def test_ends_of_generation_config(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama", eos_token_id=5)
    assert LlamaConfig.from_pretrained(folder).eos_token_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert LlamaConfig.from_pretrained(folder).eos_token_ids == (7, 9)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["dense", "int8", "int4", "group8", "table4"], indirect=True)
def test_pieces(
    weights: Any, dtype: torch.dtype, inference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in rows by three threads, a model has the bits that its tensors have when each is taken as a whole."""
    folder, theirs = saved(tmp_path, "llama-biases-tied")
    monkeypatch.setattr(checkpoint, "_PIECE", 4000)
    monkeypatch.setattr(checkpoint, "_PART", 1000)
    monkeypatch.setattr(checkpoint, "_readers", lambda: 3)
    with torch.inference_mode(inference):
        model = Llama.from_pretrained(folder, weights, dtype)
    whole = Llama(model.config, fastest(weights, dtype, "cpu"), dtype)
    state = theirs.state_dict()
    for name, slot in whole.slots().items():
        slot.load(state[name], 0)
    for (name, got), want in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want), name
    if weights == "dense":
        for name, slot in model.slots().items():
            assert torch.equal(slot.read(), state[name].to(dtype)), name


@pytest.mark.parametrize("weights", ["int8", "int4", "group8", "table4"], indirect=True)
def test_weights_that_are_not_finite(weights: str, tmp_path: Path) -> None:
    """What a thread finds wrong reaches the caller."""
    folder, _ = saved(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(state, folder / "model.safetensors")
    Llama.from_pretrained(folder)
    format = fastest(weights, torch.float32, "cpu")
    function = f"weights.{format}" if format in ("group8", "table4") else f"weights.quantize_{format}"
    with pytest.raises(
        ValueError, match=f"^torch_infini.{function}: weight must be finite, got infinity or NaN in it$"
    ):
        Llama.from_pretrained(folder, weights)


@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_a_file_cut_off_while_it_is_read(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved(tmp_path, "llama")
    path = folder / "model.safetensors"

    def cut() -> int:  # behind the look at the headers
        path.write_bytes(path.read_bytes()[:-1000])
        return 2

    monkeypatch.setattr(checkpoint, "_readers", cut)
    with pytest.raises(ValueError, match="model.safetensors must not change while it is read, got the end of it"):
        Llama.from_pretrained(folder, weights)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """All that is wrong is in one error."""
    folder, _ = saved(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"][:5].contiguous()
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].int()
    state["model.layers.9.mlp.up_proj.weight"] = torch.ones(3)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)  # old checkpoints have these
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        Llama.from_pretrained(folder)
    message = str(caught.value)
    assert "missing: model.norm.weight;" in message
    assert "surplus: model.layers.9.mlp.up_proj.weight;" in message
    assert "model.layers.0.mlp.up_proj.weight must have shape [96, 64], got [5, 64]" in message
    assert "model.layers.1.mlp.up_proj.weight must be of a floating dtype of 16 bits or more, got int32" in message
    assert "inv_freq" not in message


@pytest.mark.parametrize(
    "break_it, rule",
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-100]), "must be a whole safetensors file"),
        (lambda f: f.write_bytes(b"\xff" * 50), "must be a whole safetensors file"),
        (lambda f: f.write_bytes(b""), "must be a whole safetensors file"),
        (lambda f: f.unlink(), "a model folder must hold safetensors files"),
    ],
)
def test_broken_files(break_it: Any, rule: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama")
    break_it(folder / "model.safetensors")
    with pytest.raises((ValueError, FileNotFoundError), match=rule):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize(
    "entries, rule",
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"hidden_size": -1}, "hidden_size must be a positive integer, got -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads, 4, got 3"),
        ({"head_dim": "absent", "hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads, 4, got 66"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number from 0 to less than 1, got 'x'"),
        ({"intermediate_size": 100}, "must have shape [100, 64], got [96, 64]"),
    ],
)
def test_configs_that_are_not_served(entries: dict[str, Any], rule: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, "llama")
    edit(folder, **entries)
    with pytest.raises(ValueError, match=re.escape(rule)):
        Llama.from_pretrained(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the folder must exist, got .*nowhere"):
        Llama.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"must have a config.json, got .*, which has none"):
        Llama.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be JSON, got: "):
        Llama.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dtype must be float32, bfloat16 or float16, got float64"):
        Llama(LlamaConfig.from_dict({**SMALL, "model_type": "llama"}), dtype="float64")
    with pytest.raises(
        ValueError,
        match=r"format must be one of 'dense', 'packed', 'table4', 'int4', 'w4a16', .*, 'w8a16', .*, got 'int2'",
    ):
        Llama(LlamaConfig.from_dict({**SMALL, "model_type": "llama"}), "int2")


def test_cache_sizes() -> None:
    with pytest.raises(ValueError, match=r"torch_infini.nn.KVCache: blocks must be at least 1, got 0"):
        KVCache(1, 0, 1, 16, 16)
    rule = r"torch_infini.nn.KVCache: dtype must be float32, bfloat16, float16 or int8, got torch.float64"
    with pytest.raises(ValueError, match=rule):
        KVCache(1, 1, 1, 16, 16, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_copied_blocks(dtype: torch.dtype) -> None:
    cache = KVCache(2, 5, 3, 4, 8, dtype)
    tensors = [cache.keys, cache.values, *cache.scales]
    assert len(cache.layer(1)) == 4
    assert sum(t.nbytes for t in tensors) == 5 * 4 * cache.bytes_per_token
    for t in tensors:
        t.copy_(torch.randint(-100, 100, t.shape))
    before = [t.clone() for t in tensors]
    cache.copy_blocks([(3, 0), (0, 4)])
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(t, old[:, [3, 1, 2, 3, 3]])


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},  # which these families do not read
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


@pytest.mark.parametrize("family", ["llama", "mistral-no-window", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ROPES)
def test_rotary_embeddings(name: str, family: str, tmp_path: Path) -> None:
    """As transformers', for prompts on both sides of the original length where the table depends on it."""
    parameters = {"rope_theta": 10000.0, **ROPES[name]}
    theirs = random_model(family, rope_parameters=parameters, max_position_embeddings=256)
    theirs.save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    for length in (40, 100):
        tokens = torch.randint(320, (1, length), generator=torch.Generator().manual_seed(length)).tolist()
        (mine,) = run(model, tokens, [], is_long=length > 64)
        with torch.no_grad():
            expected = theirs(torch.tensor(tokens)).logits[0]
        near(mine, expected, theirs)


def test_a_partial_rotary_factor_that_transformers_cannot_serve(tmp_path: Path) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5})
    with pytest.raises(
        ValueError, match=r"partial_rotary_factor must be 1 or missing where rope_parameters .* got 0\.5"
    ):
        Llama.from_pretrained(tmp_path)
