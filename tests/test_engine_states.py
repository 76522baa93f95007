"""Models that keep states beside keys and values (linear attention, short convolutions, Mamba) in the engine: tokens of
generate however requests are batched, cut, preempted, forked or interrupted; in the end every row of states is free.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from support.engines import finish
from torch_infini.engine import Engine, EngineConfig, SamplingParams
from torch_infini.engine.states import StateRows
from torch_infini.nn.states import SequenceStates, StateShape
from torch_infini.patch import patch_model

pytest.importorskip("transformers")
from torch_infini.patch.paged import PagedModel  # noqa: E402  # it imports transformers
from torch_infini.testing.causal_types import VOCABULARY, build  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HYBRIDS = ("bamba", "jamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "zamba")
MAMBAS = (*HYBRIDS, "mamba", "mamba2", "falcon_mamba")  # the last three without attention
KINDS = ("qwen3_next", "bamba", "jamba", "lfm3", "olmo_hybrid", "qwen3_5_moe_text", "lfm2_moe", *MAMBAS[2:])
NEW = 9


def engine_of(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Engine]:
    torch.manual_seed(0)
    model = build(kind).to(dtype)
    patch_model(model, strict=not kind.startswith("zamba"))
    return model, Engine(PagedModel(model), config=EngineConfig(**settings))


def prompts(*lengths: int) -> list[list[int]]:
    chance = random.Random(sum(lengths))
    return [[chance.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def generated(model: Any, prompt: list[int], count: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    made: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return made[0, len(prompt) :].tolist()


def assert_rows_are_free(engine: Engine) -> None:
    states = engine.scheduler.states
    assert states is not None and states.free == states.sequences == engine.config.max_num_seqs


@pytest.mark.full(beyond=3)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate(kind: str) -> None:
    """Prompts in chunks beside sequences that generate, requests that arrive later, and preemption."""
    model, engine = engine_of(kind, block_size=8, chunk_size=16, max_num_batched_tokens=48, max_num_seqs=3)
    rows = prompts(3, 50, 17, 1, 33)
    expected = [generated(model, row) for row in rows]
    params = SamplingParams.greedy(max_tokens=NEW, ignore_eos=True)
    ids = [engine.add(row, params) for row in rows[:2]]
    for row in rows[2:]:
        engine.step()
        ids.append(engine.add(row, params))
    outputs = finish(engine)
    assert [outputs[id].token_ids for id in ids] == expected
    assert_rows_are_free(engine)

    small = Engine(engine.model, config=EngineConfig(block_size=8, chunk_size=16, max_num_seqs=3, cache_blocks=9))
    ids = [small.add(row, params) for row in rows]
    outputs = finish(small)
    assert small.metrics().preemptions > 0
    assert [outputs[id].token_ids for id in ids] == expected
    assert_rows_are_free(small)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "jamba"])
def test_bits_do_not_depend_on_neighbours(kind: str) -> None:
    """In bfloat16 too, where other sums would soon be other tokens."""
    model, alone = engine_of(kind, torch.bfloat16, chunk_size=16, max_num_seqs=4)
    params, rows = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True), prompts(70, 5, 40, 19)
    expected = []
    for row in rows:
        id = alone.add(row, params)
        expected.append(finish(alone)[id].token_ids)
    for settings in ({}, {"cache_blocks": 12, "block_size": 16}):
        engine = Engine(alone.model, config=EngineConfig(chunk_size=16, max_num_seqs=4, **settings))
        ids = [engine.add(row, params) for row in rows]
        outputs = finish(engine)
        assert [outputs[id].token_ids for id in ids] == expected
        assert (engine.metrics().preemptions > 0) == bool(settings)


def test_samples_of_a_prompt() -> None:
    """Each sample goes on from a copy of the prompt's state; the next request has a row that was used before."""
    _, engine = engine_of("qwen3_next", max_num_seqs=4)
    (row,) = prompts(37)
    id = engine.add(row, SamplingParams(n=4, seed=5, max_tokens=20, ignore_eos=True))
    many = finish(engine)[id]
    assert len({tuple(completion.token_ids) for completion in many.outputs}) == 4
    assert_rows_are_free(engine)
    for seed, completion in enumerate(many.outputs[:1]):
        id = engine.add(row, SamplingParams(seed=5 + seed, max_tokens=20, ignore_eos=True))
        assert finish(engine)[id].token_ids == completion.token_ids
    assert engine.metrics().reused_tokens == 0  # the prompt is shorter than a chunk, after which a state is kept


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", ["lfm3", "olmo_hybrid", *MAMBAS])
def test_prefixes(kind: str) -> None:
    """A prompt begins with the longest prefix of whole chunks whose state is kept, and its tokens are the same."""
    settings = {"block_size": 8, "chunk_size": 16, "max_num_seqs": 2, "cache_blocks": 2000}
    model, engine = engine_of(kind, **settings)
    params = SamplingParams.greedy(max_tokens=NEW, ignore_eos=True)
    (long, other) = prompts(70, 40)
    rows = [long, long[:50] + other[:9], long[:33], long[:16] + other, long[:15] + other, long]
    expected = [generated(model, row) for row in rows]
    reused = []
    for row, tokens in zip(rows, expected, strict=True):
        id = engine.add(row, params)
        assert finish(engine)[id].token_ids == tokens
        assert engine.step() == []  # a step of nothing loses no copy
        reused.append(engine.metrics().reused_tokens - sum(reused))
    assert reused == [0, 48, 32, 16, 0, 64]
    assert_rows_are_free(engine)

    ids = [engine.add(row, params) for row in rows]  # and together
    outputs = finish(engine)
    assert [outputs[id].token_ids for id in ids] == expected
    engine.forget_prefixes()
    before = engine.metrics().reused_tokens
    id = engine.add(long, params)
    assert finish(engine)[id].token_ids == expected[0] and engine.metrics().reused_tokens == before


def test_states_of_prefixes() -> None:
    """The least recently used is dropped, and copies are in order."""
    rows = StateRows(2, 2)
    first, second = rows.begin(None), rows.begin(None)
    rows.keep(10, first)
    rows.keep(11, first)
    rows.keep(10, second)  # is kept already
    rows.release(second)
    assert rows.begin(10) == second and rows.has(11)
    rows.keep(12, second)
    assert rows.has(10) and rows.has(12) and not rows.has(11)
    (to_10, to_11, from_10, to_12) = rows.copies
    assert (to_10[0], to_11[0], to_12[0]) == (first, first, second) and from_10 == (to_10[1], second)
    assert to_12[1] == to_11[1] and {to_10[1], to_11[1]} == {2, 3}
    rows.release(first)
    assert rows.fork(second) == first and rows.copies[-1] == (second, first)
    rows.restart()
    assert rows.free == 2 and not rows.copies and not rows.has(10)


def test_steps_that_fail_and_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is interrupted begins again from its tokens: a state that a step has changed is not used twice."""
    model, engine = engine_of("qwen3_next", max_num_seqs=2)
    rows = prompts(21, 9)
    expected = [generated(model, row) for row in rows]
    ids = [engine.add(row, SamplingParams.greedy(max_tokens=NEW, ignore_eos=True)) for row in rows]
    engine.step()
    engine.step()
    run = engine._runner.run

    def interrupted(*args: Any) -> Any:
        run(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = finish(engine)
    assert [outputs[id].token_ids for id in ids] == expected
    assert_rows_are_free(engine)


def test_adapters_may_change_what_a_mixer_calls() -> None:
    """And not the layer whose weight it reads."""
    model, _ = engine_of("jamba")
    sites = PagedModel(model).lora_sites()
    names = {name.rpartition(".")[2] for name in sites if ".mamba." in name}
    assert names == {"in_proj", "x_proj", "out_proj"}


def test_the_step_is_recorded() -> None:
    _, engine = engine_of("olmo_hybrid")
    id = engine.add(prompts(12)[0], SamplingParams.greedy(max_tokens=5, ignore_eos=True))
    assert len(finish(engine)[id].token_ids) == 5
    assert engine.model.is_recordable
    assert engine.model.bytes_per_sequence > 0


def test_an_engine_that_is_dropped_frees_its_cache() -> None:
    _, engine = engine_of("lfm3", enforce_eager=True)
    engine.add(prompts(12)[0], SamplingParams.greedy(max_tokens=2))
    finish(engine)
    cache = weakref.ref(engine._cache)
    del engine
    gc.collect()
    assert cache() is None


def test_rows_of_states() -> None:
    shapes = [StateShape((3, 2), torch.float32), StateShape((4,), torch.bfloat16)]
    states = SequenceStates(shapes, 3)
    assert [shape.nbytes for shape in shapes] == [24, 8]
    for number, tensor in enumerate(states.tensors):
        tensor.copy_(torch.arange(3).view(3, *[1] * (tensor.dim() - 1)) + number)
    states.copy([(2, 0), (0, 1)])
    states.reset([2])
    for number, tensor in enumerate(states.tensors):
        assert torch.equal(tensor[0], tensor[1]) and (tensor[0] == 2 + number).all() and not tensor[2].any()
