"""A request's tokens and log-probabilities are the same bits alone, among others, preempted, or with cached blocks.

Contexts are longer than the keys that attention takes at once and than those that it splits among threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import finish
from torch_infini._core.products import aten_from_set_to
from torch_infini.engine import CompletionOutput, Engine, EngineConfig, SamplingParams
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 40
KINDS = pytest.mark.parametrize(
    "dtype, weights, kv_cache_dtype",
    [
        (torch.bfloat16, "dense", None),
        (torch.bfloat16, "dense", "int8"),
        (torch.bfloat16, "int8", None),
        (torch.bfloat16, "int4", "int8"),
        (torch.float32, "dense", None),
        (torch.float32, "dense", "int8"),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def our_products() -> Iterator[None]:
    """The bits of ATen's depend on the number of rows."""
    with aten_from_set_to(None):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens depend on far ones, with heads of 64 columns."""
    folder = tmp_path_factory.mktemp("model")
    random_model(
        "llama", hidden_size=128, head_dim=64, num_hidden_layers=2, max_position_embeddings=1024
    ).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, logprobs=2)


def bits(completion: CompletionOutput) -> tuple[list[int], Any]:
    return completion.token_ids, completion.logprobs


def alone(model: Llama, rows: list[list[int]], **settings: Any) -> list[Any]:
    """Each request in an engine that has nothing else and remembers nothing."""
    found = []
    for seed, row in enumerate(rows):
        engine = Engine(model, config=EngineConfig(max_num_seqs=1, enable_prefix_caching=False, **settings))
        engine.add(row, sampled(seed))
        (output,) = finish(engine).values()
        found.append(bits(output.outputs[0]))
    return found


def together(engine: Engine, rows: list[list[int]], seed: int) -> list[Any]:
    """All of them, in any order, some steps apart."""
    chance, outputs, ids = random.Random(seed), {}, {}
    for at in chance.sample(range(len(rows)), len(rows)):
        ids[at] = engine.add(rows[at], sampled(at))
        for _ in range(chance.randint(0, 6)):
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= finish(engine)
    return [bits(outputs[ids[at]].outputs[0]) for at in range(len(rows))]


@pytest.mark.full(beyond=2)
@KINDS
def test_preempted(folder: Path, dtype: torch.dtype, weights: Any, kv_cache_dtype: Any) -> None:
    """24 requests on 40 blocks: what was generated is computed again as it was at first."""
    model = Llama.from_pretrained(folder, weights, dtype)
    chance = random.Random(0)
    rows = [
        prompt(length, i) for i, length in enumerate([560, 65, 64, 1, *(chance.randint(2, 200) for _ in range(20))])
    ]
    expected = alone(model, rows, kv_cache_dtype=kv_cache_dtype)
    for seed, settings in enumerate(
        ({}, {"enable_prefix_caching": False}, {"enforce_eager": True}, {"max_num_batched_tokens": 64})
    ):
        config = EngineConfig(block_size=16, cache_blocks=40, kv_cache_dtype=kv_cache_dtype, **settings)
        engine = Engine(model, config=config)
        assert together(engine, rows, seed) == expected, settings
        metrics = engine.metrics()
        assert metrics.preemptions > 0 and metrics.free_blocks == metrics.blocks


@pytest.mark.full(beyond=6)
@KINDS
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_shared_prefixes(
    folder: Path,
    block_size: int,
    dtype: torch.dtype,
    weights: Any,
    kv_cache_dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 requests that begin alike: blocks are reused up to where prompts are cut."""
    model = Llama.from_pretrained(folder, weights, dtype)
    chance, shared = random.Random(1), prompt(600, 99)
    rows = [shared[: chance.choice([100, 129, 193, 300, 577])] + prompt(chance.randint(1, 60), i) for i in range(16)]
    rows += [shared[:193], shared[:194], shared[:577], shared]
    expected = alone(model, rows, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(model, config=EngineConfig(block_size=block_size, kv_cache_dtype=kv_cache_dtype))
    for seed in range(3):
        assert together(engine, rows, seed) == expected
    assert engine.metrics().reused_tokens > 1000


def test_generated_tokens_as_a_prompt(folder: Path) -> None:
    """A conversation's next turn begins with the blocks of the last answer, unless the engine is told otherwise."""
    model = Llama.from_pretrained(folder, "dense", torch.bfloat16)
    first = prompt(100, 0)
    reused = {}
    for reuse_generated in (True, False):
        engine = Engine(model, config=EngineConfig(block_size=16, reuse_generated=reuse_generated))
        engine.add(first, SamplingParams.greedy(max_tokens=100))
        (output,) = finish(engine).values()
        second = first + output.outputs[0].token_ids + prompt(20, 1)
        (expected,) = alone(model, [second])
        engine.add(second, sampled(0))
        (output,) = finish(engine).values()
        reused[reuse_generated] = output.num_cached_tokens
        if not reuse_generated:
            assert bits(output.outputs[0]) == expected
    assert reused == {True: 192, False: 64}


def test_replayed_tokens_ask_for_no_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that is computed again only the last token's logits are."""
    model = Llama.from_pretrained(folder, "dense", torch.float32)
    engine = Engine(model, config=EngineConfig(block_size=16, cache_blocks=12, enable_prefix_caching=False))
    ids = [engine.add(prompt(40, i), SamplingParams.greedy(max_tokens=80)) for i in range(2)]
    run, shapes = engine._runner.run, []

    def watched(chunks: Any, *copies: Any) -> Any:
        logits = run(chunks, *copies)
        shapes.append((len(chunks), logits.shape[0], len({id(chunk.blocks) for chunk in chunks})))
        return logits

    monkeypatch.setattr(engine._runner, "run", watched)
    outputs = finish(engine)
    assert all(len(outputs[id].outputs[0].token_ids) == 80 for id in ids) and engine.metrics().preemptions > 0
    assert any(chunks > 20 for chunks, _, _ in shapes), "a step that computes generated tokens again"
    assert all(logits <= sequences for _, logits, sequences in shapes)
