"""infinilm.infer_engine.InferEngine as scripts call it: forward and generate in every form; transformers' tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.infinilm_models import FAMILIES, GREEDY, NEW, PROMPTS, by_row, greedy, infini, loaded, saved
from torch_infini.compat import infinicore
from torch_infini.compat.infinilm import modeling_utils
from torch_infini.compat.infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from torch_infini.compat.infinilm.generation.utils import infini_to_numpy
from torch_infini.compat.infinilm.infer_engine import GenerationConfig, InferEngine
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.compat.infinilm.models.llama import AutoLlamaModel
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model folder, and the tokens behind PROMPTS."""
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return saved("llama", tmp_path_factory.mktemp("llama"))


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


def test_rotations_by_length(tmp_path: Path) -> None:
    """Of a model with two (longrope): in one batch, prompts of either and one that crosses the original length."""
    factors = {"short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32, **factors}
    model = random_model("llama", rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=128)
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 320, (length,), generator=draw).tolist() for length in (10, 29, 32, 33, 50)]
    for cache in (StaticKVCacheConfig(5, 64), PagedKVCacheConfig(num_blocks=64, block_size=4)):
        engine.reset_cache(cache)
        assert by_row(engine.generate(prompts, GREEDY)) == [greedy(model, prompt) for prompt in prompts]


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


HOT = {"max_new_tokens": NEW, "temperature": 20.0, "top_k": 0}


def test_generate_draws_by_its_seed(llama: tuple[Path, list[list[int]]]) -> None:
    engine = loaded(llama[0])
    draw = lambda rows, **more: by_row(engine.generate(infini(rows), GenerationConfig(**HOT, **more)))
    same = draw(PROMPTS[:1] * 2, seed=1)
    assert draw(PROMPTS[:1], seed=1) == same[:1] != draw(PROMPTS[:1], seed=2) and same[0] != same[1]


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_generate_without_a_seed_is_a_loop_of_forward(cache: Any, llama: tuple[Path, list[list[int]]]) -> None:
    """By its fixed number: a row's tokens are the same in each call and beside any other row."""
    loop = loaded(llama[0], StaticKVCacheConfig(1, 32))
    expected = []
    for prompt in PROMPTS:
        tokens, past = list(prompt), 0
        while len(tokens) < len(prompt) + NEW:
            settings = {"temperature": 20.0, "top_k": 0, "past_kv_lengths": infini([past])}
            new = loop.forward(infini([tokens[past:]]), **settings)
            past = len(tokens)
            tokens += new.to_numpy().tolist()
        expected.append(tokens[len(prompt) :])
    assert expected != llama[1]  # not the greedy tokens
    engine = loaded(llama[0], cache)
    for _ in range(2):
        assert by_row(engine.generate(infini(PROMPTS), GenerationConfig(**HOT))) == expected
    assert by_row(engine.generate(infini([PROMPTS[1]] * 2), GenerationConfig(**HOT))) == [expected[1]] * 2


def test_generate_calls_hooks(llama: tuple[Path, list[list[int]]]) -> None:
    engine = loaded(llama[0], StaticKVCacheConfig(2, 32))
    registry, seen = _infinilm.HookRegistry(), list[Any]()
    registry.register_hook("norm", lambda name, tensor, layer: seen.append((type(tensor), tensor.shape[0])))
    engine.register_hooks(registry)
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == llama[1]
    rows = [10] + [2] * (NEW - 1) + [5] + [1] * (NEW - 1)  # two rows, then the third
    assert seen == [(infinicore.Tensor, n) for n in rows]


def test_rows_as_long_as_the_cache(llama: tuple[Path, list[list[int]]]) -> None:
    """Without max_new_tokens each row fills its part of the cache, and rows may end in different steps."""
    for cache in (StaticKVCacheConfig(2, 12), PagedKVCacheConfig(num_blocks=3, block_size=4)):
        engine = loaded(llama[0], cache)
        settings = GenerationConfig(top_k=1, stop_on_eos=False)
        longer = by_row(engine.generate([PROMPTS[0], PROMPTS[1][:3]], settings))
        short = by_row(engine.generate([PROMPTS[1][:3]], settings))
        assert longer[0] == llama[1][0][:7] + [llama[1][0][6]] * 2 and longer[1:] == short and len(short[0]) == 9


def test_settings_by_name(llama: tuple[Path, list[list[int]]]) -> None:
    """Fields of GenerationConfig in place of one, and a tokenizer, whose end token is the last choice."""
    folder, expected = llama
    for model in (loaded(folder), AutoLlamaModel.from_pretrained(folder)):
        assert by_row(model.generate(infini(PROMPTS), max_new_tokens=NEW, top_k=1, tokenizer=None)) == expected
        assert by_row(model.generate(infini(PROMPTS), GREEDY, max_new_tokens=3)) == [row[:3] for row in expected]
        with pytest.raises(TypeError, match="max_tokens"):
            model.generate(infini(PROMPTS), max_tokens=3)
    config = json.loads((folder / "config.json").read_text())
    endless = folder / "endless"
    endless.mkdir()
    (endless / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    engine = InferEngine(endless)
    modeling_utils.load_model_state_dict_by_tensor(engine, folder)
    tokenizer = SimpleNamespace(eos_token_id=expected[0][2])
    until = expected[0][: expected[0].index(tokenizer.eos_token_id) + 1]
    assert by_row(engine.generate(infini(PROMPTS[:1]), GREEDY, tokenizer=tokenizer)) == [until]
    assert by_row(engine.generate(infini(PROMPTS[:1]), GREEDY, tokenizer=tokenizer, eos_token_id=[])) == expected[:1]


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
    name = "infinilm.infer_engine.InferEngine.generate: "
    for ids, error, message in (
        (torch.tensor([1, 2]), ValueError, f"{name}input_ids must be int64 or int32 [rows, length], got int64 [2]"),
        (
            torch.tensor([[0.5]]),
            ValueError,
            f"{name}input_ids must be int64 or int32 [rows, length], got float32 [1, 1]",
        ),
        ("text", TypeError, f"{name}input_ids must be a tensor or a list of token ids for each row, got 'text'"),
        (
            [[1], []],
            ValueError,
            f"{name}input_ids[1] must have 1 to 15 tokens, fewer than the model's positions and the cache hold, got 0",
        ),
        ([[1, 320]], ValueError, f"{name}input_ids[0] must be token ids from 0 to 319, got 320"),
    ):
        with pytest.raises(error) as raised:
            engine.generate(ids, GREEDY)
        assert str(raised.value) == message
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == llama[1]  # three rows, one behind the other
    assert engine.generate([], GREEDY) == []
    with pytest.raises(ValueError, match=r"input_ids\[0\] must have 1 to 15 tokens.*, got 16"):
        engine.generate([[1] * 16], GREEDY)
    engine.reset_cache(StaticKVCacheConfig(2, 32))
    assert len(engine.generate([[1] * 16], GREEDY)) == NEW
