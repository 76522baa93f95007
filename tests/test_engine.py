"""The engine: greedy tokens equal to transformers' however requests are batched, cut, preempted or begun from others'
blocks; a request's tokens do not depend on its neighbours; whatever goes wrong ends one request alone.
"""

from __future__ import annotations

import gc
import random
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import finish, small_engine, soak
from support.rounding import assert_likeliest, greedy_tokens, rounding_limit, sums_of
from torch_infini.engine import LLM, BlockManager, Engine, EngineConfig, SamplingParams
from torch_infini.engine.blocks import ROOT, OutOfBlocks
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import MODELS, SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = SMALL["vocab_size"]
TOKENS = 256


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def check_likeliest(model: Any, prompt: list[int], new: list[int]) -> None:
    """Each new token is the one that the model finds likeliest behind those before it."""
    logits = model(torch.tensor([prompt + new[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    assert_likeliest(torch.tensor(new), logits, *sums_of(model.config))


@torch.no_grad()
def their_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def with_arrivals(engine: Engine, rows: list[list[int]], params: SamplingParams, seed: int) -> list[list[int]]:
    """The tokens of requests that arrive one by one, some steps apart."""
    chance, ids, outputs = random.Random(seed), [], {}
    for row in rows:
        ids.append(engine.add(row, params))
        for _ in range(chance.randint(0, 12)):
            outputs |= {output.request_id: output for output in engine.step()}
    outputs |= finish(engine)
    return [outputs[id].token_ids for id in ids]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    rows = prompts(3, 40, 1, 90)
    rows.append(rows[3][:64] + rows[1])  # begins as another does
    params = SamplingParams.greedy(max_tokens=TOKENS)
    length = max(map(len, rows)) + TOKENS
    for i, settings in enumerate(
        (
            {"max_num_seqs": 1, "chunk_size": 32},
            {"enforce_eager": True, "enable_prefix_caching": False},
            {"block_size": 16, "chunk_size": 16, "max_num_batched_tokens": 16},
            {"block_size": 8, "chunk_size": 8, "cache_blocks": 70},  # two of the five at a time: preemptions
            {"block_size": length, "max_num_seqs": 5, "enable_prefix_caching": False},  # a block each: a static cache
        )
    ):
        engine = Engine(model, config=EngineConfig(max_model_len=length, **settings))
        for row, new in zip(rows, with_arrivals(engine, rows, params, i), strict=True):
            assert len(new) == TOKENS
            check_likeliest(theirs, row, new)
        metrics = engine.metrics()
        assert metrics.free_blocks == metrics.blocks
        assert (metrics.preemptions > 0) == ("cache_blocks" in settings)
        assert (metrics.reused_tokens >= 64) == settings.get("enable_prefix_caching", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weights, kv_cache_dtype", [("dense", None), ("int8", None), ("int4", None), ("dense", "int8")], ids=str
)
def test_sampled_tokens_do_not_depend_on_neighbours(
    weights: Any, kv_cache_dtype: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    random_model("llama").save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, weights, dtype)
    rows = prompts(20, 7, 61, 35, 1, 100)
    settings = [
        SamplingParams(temperature=1.0 + i / 4, top_p=(1.0, 0.9)[i % 2], top_k=(0, 50)[i % 2], seed=i, max_tokens=60)
        for i in range(len(rows))
    ]
    config = EngineConfig(block_size=16, chunk_size=32, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
    alone = []
    for row, params in zip(rows, settings, strict=True):
        engine = Engine(model, config=config)
        id = engine.add(row, params)
        alone.append(finish(engine)[id].token_ids)
    assert len({tuple(tokens) for tokens in alone}) == len(rows)
    chance = random.Random(0)
    for _ in range(3):
        engine, outputs, ids = Engine(model, config=config), {}, {}
        for i in chance.sample(range(len(rows)), len(rows)):
            ids[i] = engine.add(rows[i], settings[i])
            for _ in range(chance.randint(0, 5)):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= finish(engine)
        assert [outputs[ids[i]].token_ids for i in range(len(rows))] == alone


def test_int8_keys_and_values(tmp_path: Path) -> None:
    """Greedy tokens are the same batched, recorded, preempted and in blocks of any size. Cut elsewhere, last bits may
    make a step of int8: then most are, as most are those of a cache of floats."""
    random_model("llama").save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    rows = prompts(3, 40, 1, 90)
    rows.append(rows[3][:64] + rows[1])
    params = SamplingParams.greedy(max_tokens=60)

    def serve(seed: int, **settings: Any) -> tuple[list[list[int]], Any]:
        engine = Engine(model, config=EngineConfig(max_model_len=200, **settings))
        tokens, metrics = with_arrivals(engine, rows, params, seed), engine.metrics()
        assert metrics.free_blocks == metrics.blocks
        return tokens, metrics

    alone, _ = serve(0, kv_cache_dtype="int8", max_num_seqs=1, enable_prefix_caching=False)
    for i, settings in enumerate(({"enforce_eager": True}, {"block_size": 16}, {"block_size": 200, "max_num_seqs": 5})):
        together, _ = serve(i, kv_cache_dtype="int8", enable_prefix_caching=False, **settings)
        assert together == alone, settings
    cut, metrics = serve(3, kv_cache_dtype="int8", block_size=16, chunk_size=16, max_num_batched_tokens=16)
    assert metrics.reused_tokens >= 64
    preempted, metrics = serve(4, kv_cache_dtype="int8", block_size=8, cache_blocks=25)
    assert metrics.preemptions > 0 and preempted == alone
    floats, _ = serve(5)
    for other in (cut, floats):
        same = [a == b for mine, theirs in zip(alone, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
        assert sum(same) > len(same) // 2


def test_samples_of_a_prompt(tmp_path: Path) -> None:
    """n samples share the prompt's blocks, write into copies, and each is what it would be by its own seed."""
    engine = small_engine(tmp_path, block_size=16)
    (row,) = prompts(37)
    params = SamplingParams(n=4, seed=5, max_tokens=40)
    id = engine.add(row, params)
    engine.step()
    assert engine.metrics().running == 4
    assert engine.metrics().blocks - engine.metrics().free_blocks == 3  # shared: nobody has written behind the prompt
    engine.step()
    assert engine.metrics().blocks - engine.metrics().free_blocks == 6
    many = finish(engine)[id]
    assert [completion.index for completion in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in many.outputs}) == 4
    id = engine.add(row, SamplingParams(seed=5, max_tokens=40))
    assert finish(engine)[id].token_ids == many.outputs[0].token_ids


def test_ends(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    (row,) = prompts(30)
    greedy = SamplingParams.greedy

    def run(params: SamplingParams) -> Any:
        id = engine.add(row, params)
        return finish(engine)[id].outputs[0]

    plain = run(greedy(max_tokens=50))
    assert (plain.finish_reason, len(plain.token_ids)) == ("length", 50)
    token = next(t for i, t in enumerate(plain.token_ids) if i >= 8 and t not in plain.token_ids[:i])
    at = plain.token_ids.index(token)
    stopped = run(greedy(max_tokens=50, stop_token_ids=[token]))
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids) == ("stop", token, plain.token_ids[: at + 1])
    text = engine.tokenizer.decode(plain.token_ids)
    word = engine.tokenizer.decode([next(t for t in plain.token_ids[5:] if t >= 256)]).strip()
    assert re.fullmatch(r"w\d+", word)
    by_text = run(greedy(max_tokens=50, stop=[word, "never there"]))
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", word)
    assert by_text.text == text[: text.index(word)]
    late = run(greedy(max_tokens=50, stop_token_ids=[token], min_tokens=at + 5))
    assert len(late.token_ids) >= at + 5
    whole = run(greedy(max_tokens=None))
    assert len(whole.token_ids) == SMALL["max_position_embeddings"] - len(row)


def test_end_of_sequence(tmp_path: Path) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    (row,) = prompts(12)
    tokens = their_tokens(theirs, row, 40)
    end = next(t for i, t in enumerate(tokens) if i >= 6 and t not in tokens[:i])
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = end
    theirs.save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    (output,) = llm.generate([row], SamplingParams.greedy(max_tokens=40))
    assert output.token_ids == tokens[: tokens.index(end) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    (output,) = llm.generate([row], SamplingParams.greedy(max_tokens=40, ignore_eos=True))
    assert output.token_ids == tokens


def test_log_probabilities(tmp_path: Path) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    (row,) = prompts(12)
    (output,) = LLM(tmp_path).generate([row], SamplingParams(seed=3, max_tokens=9, logprobs=4))
    with torch.no_grad():
        logits = theirs(torch.tensor([row + output.token_ids])).logits[0, len(row) - 1 : -1]
    sums, want = sums_of(theirs.config), logits.log_softmax(-1)
    limit = 2 * rounding_limit(logits, *sums)  # of the logit, and of the logarithm of the sum
    best = want.topk(5).values
    assert float((best[:, :-1] - best[:, 1:]).min()) > limit  # or their order might not be the same on every CPU
    for i, (logprob, top) in enumerate((one.logprob, one.top) for one in output.outputs[0].token_logprobs or ()):
        assert abs(logprob - float(want[i, output.token_ids[i]])) < limit
        assert [token for token, _ in top] == want[i].topk(4).indices.tolist()


def test_cancelled(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, max_num_seqs=2)
    rows = prompts(30, 31, 32)
    ids = [engine.add(row, SamplingParams.greedy(max_tokens=20)) for row in rows]
    for _ in range(4):
        engine.step()
    assert engine.abort(ids[0])  # runs
    assert engine.abort(ids[2])  # waits
    assert not engine.abort(ids[0])
    assert not engine.abort("nobody's")
    outputs = finish(engine)
    assert [outputs[id].outputs[0].finish_reason for id in ids] == ["abort", "length", "abort"]
    assert 0 < len(outputs[ids[0]].token_ids) < 20
    assert engine.metrics().free_blocks == engine.metrics().blocks


def test_nan_logits_end_one_request(tmp_path: Path) -> None:
    """A prompt that meets a NaN in the embedding fails; its neighbours' tokens are what they are alone."""
    engine = small_engine(tmp_path)
    rows = [[token for token in row if token != 7] for row in prompts(20, 25, 30)]
    ids = [engine.add(row, SamplingParams.greedy(max_tokens=20)) for row in rows]
    want = [finish(engine)[id].token_ids for id in ids[:1]] or None
    engine = small_engine(tmp_path)
    engine.model.embed.weight.data[7] = torch.nan
    good = engine.add(rows[0], SamplingParams.greedy(max_tokens=20, logit_bias={7: -1000.0}))
    bad = engine.add([*rows[1], 7], SamplingParams.greedy(max_tokens=20))
    outputs = finish(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert re.search(r"logits must have neither NaN nor .*got nan", outputs[bad].outputs[0].error or "")
    assert outputs[good].outputs[0].finish_reason == "length"
    assert want is None or outputs[good].token_ids == want[0]
    assert engine.metrics().free_blocks == engine.metrics().blocks


def test_a_step_that_fails_ends_its_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(tmp_path)
    rows = prompts(20, 25)
    failing = engine.add(rows[0])
    monkeypatch.setattr(engine._runner, "run", lambda chunks, copies: torch.empty(1, 0).matmul(torch.empty(1, 1)))
    engine.step()
    monkeypatch.undo()
    good = engine.add(rows[1], SamplingParams(max_tokens=5))
    outputs = finish(engine)
    assert len(outputs[good].token_ids) == 5
    assert failing not in outputs  # it was told of before
    assert engine.metrics().requests["error"] == 1
    assert engine.metrics().free_blocks == engine.metrics().blocks


@pytest.mark.parametrize(
    "prompt, params, rule",
    [
        ([], {}, "prompt must have at least one token, got none"),
        ([1, VOCABULARY], {}, f"prompt must be token ids from 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
        ([-1], {}, f"prompt must be token ids from 0 to {VOCABULARY - 1}, got -1"),
        ([1.5], {}, f"prompt must be token ids from 0 to {VOCABULARY - 1}, got 1.5"),
        (
            [1] * 64,
            {},
            "prompt must be shorter than 64 tokens, the lesser of max_model_len and the cache's size, got 64",
        ),
        ([1], {"n": 1025}, "n must be at most 1024, got 1025"),
        ([1], {"stop_token_ids": [5000]}, "stop_token_ids and logit_bias must name tokens from 0 to 319, got 5000"),
        ([1], {"logit_bias": {400: 1.0}}, "stop_token_ids and logit_bias must name tokens from 0 to 319, got 400"),
        ("text", {}, "prompt must be token ids because the model's folder has no tokenizer, got text"),
        ([1], {"stop": "x"}, "stop must be empty where there is no tokenizer, got ('x',)"),
    ],
)
def test_requests_that_are_refused(prompt: Any, params: dict[str, Any], rule: str, tmp_path: Path) -> None:
    """The others go on."""
    engine = small_engine(tmp_path, tokenizer=False, max_num_seqs=8, cache_blocks=4, block_size=16)
    (row,) = prompts(20)
    id = engine.add(row, SamplingParams(max_tokens=10))
    engine.step()
    with pytest.raises(ValueError, match=re.escape(f"torch_infini.Engine: {rule}")):
        engine.add(prompt, SamplingParams(**params))
    assert len(finish(engine)[id].token_ids) == 10


@pytest.mark.parametrize(
    "settings, rule",
    [
        ({"max_num_seqs": 0}, "torch_infini.EngineConfig: max_num_seqs must be an integer of at least 1, got 0"),
        ({"block_size": 1.5}, "torch_infini.EngineConfig: block_size must be an integer of at least 1, got 1.5"),
        ({"kv_cache_dtype": "fp8"}, "EngineConfig: kv_cache_dtype must be \"int8\" or None (the model's), got 'fp8'"),
        ({"kv_cache_dtype": torch.int8}, 'kv_cache_dtype must be "int8" or None (the model\'s), got torch.int8'),
        ({"cache_bytes": 1}, "torch_infini.Engine: cache_bytes must be at least 24576, the size of a block, got 1"),
        ({"cache_bytes": 1 << 20, "cache_blocks": 3}, "cache_blocks must be None where cache_bytes is given, got both"),
        (
            {"max_model_len": 513},
            "torch_infini.Engine: max_model_len must be at most the model's positions, 512, got 513",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        small_engine(tmp_path, **settings)


def test_cache_bytes(tmp_path: Path) -> None:
    token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, columns, bytes
    engine = small_engine(tmp_path, cache_bytes=100 * token, block_size=16)
    assert engine.bytes_per_token == token
    assert engine.metrics().blocks == 6
    assert engine.max_model_len == 96
    int8 = small_engine(tmp_path, cache_bytes=100 * token, block_size=16, kv_cache_dtype="int8")
    assert int8.bytes_per_token == 2 * 3 * 2 * (16 + 4)  # a scale of 4 bytes for each row of 16
    assert int8.metrics().blocks == 20


def test_first_come_first_served(tmp_path: Path) -> None:
    """With room for two, requests begin in their order, and a long prompt does not stop running requests."""
    engine = small_engine(tmp_path, max_num_seqs=2, chunk_size=32, max_num_batched_tokens=32)
    rows = prompts(200, 5, 5, 5)
    ids = [engine.add(row, SamplingParams.greedy(max_tokens=12)) for row in rows]
    seen: list[str] = []
    at_long_prompt = 0
    while not engine.is_idle:
        for output in engine.step():
            if output.request_id not in seen:
                seen.append(output.request_id)
            if ids[0] not in seen and output.token_ids:
                at_long_prompt += 1
    assert at_long_prompt == 0  # it came first: its chunks fill the steps
    assert seen == ids
    late = engine.add(rows[1], SamplingParams.greedy(max_tokens=40))
    engine.step()
    long = engine.add(rows[0][::-1], SamplingParams.greedy(max_tokens=2))
    told = [[output.request_id for output in engine.step()] for _ in range(6)]
    assert all(late in step for step in told)  # a token in every step in which the long prompt is computed
    assert long not in sum(told, [])
    finish(engine)


def test_chunks_of_one_prompt_in_a_step(tmp_path: Path) -> None:
    """As many as max_num_batched_tokens allows; where they are cut decides about last bits, not how many there are."""
    (row,) = prompts(100)
    found = {}
    cases = (16, 16, 7), (16, 50, 2), (16, 1000, 1), (1, 40, 3), (1, 100, 1), (100, 1, 1)
    for chunk_size, max_num_batched_tokens, steps in cases:
        engine = small_engine(
            tmp_path, chunk_size=chunk_size, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4
        )
        engine.add(row, SamplingParams.greedy(max_tokens=3, logprobs=5))
        taken = 1
        while not (outputs := engine.step()):
            taken += 1
        assert taken == steps, (chunk_size, max_num_batched_tokens)
        while not outputs[0].finished:
            outputs = engine.step()
        found[chunk_size, max_num_batched_tokens] = outputs[0].outputs[0]
    for other in found.values():
        assert other.token_ids == found[16, 16].token_ids
    assert found[16, 16].logprobs == found[16, 50].logprobs == found[16, 1000].logprobs
    assert found[1, 40].logprobs == found[1, 100].logprobs


def test_two_engines_and_one_that_is_dropped(tmp_path: Path) -> None:
    rows = prompts(20, 30)
    params = SamplingParams.greedy(max_tokens=30)
    first, second = small_engine(tmp_path / "a", "llama"), small_engine(tmp_path / "b", "qwen3")
    alone = []
    for engine, row in ((first, rows[0]), (second, rows[1])):
        id = engine.add(row, params)
        alone.append(finish(engine)[id].token_ids)
    third = small_engine(tmp_path / "c")
    ids = [engine.add(row, params) for engine, row in ((first, rows[0]), (second, rows[1]), (third, rows[0]))]
    outputs: list[Any] = [{}, {}]
    for step in range(40):
        for i, engine in enumerate((first, second)):
            outputs[i] |= {output.request_id: output for output in engine.step()}
        if step == 5:
            third.step()
            gone = weakref.ref(third.model), weakref.ref(third._cache)
            del third
            gc.collect()
            assert gone[0]() is None
            assert gone[1]() is None
    assert [outputs[i][ids[i]].token_ids for i in range(2)] == alone


def test_metrics(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, block_size=16, chunk_size=32)
    (row,) = prompts(40)
    engine.add(row, SamplingParams.greedy(max_tokens=10))
    finish(engine)
    engine.add(row, SamplingParams.greedy(max_tokens=10))
    finish(engine)
    m = engine.metrics()
    assert (m.generated_tokens, m.reused_tokens, m.prompt_tokens) == (20, 32, 48)
    assert m.steps == 20
    assert m.requests == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert m.kept_blocks == 3  # two of the prompt, one filled by the output
    assert m.tokens_per_second == 20 / m.seconds
    weights = 20 * engine.model.bytes_per_step
    keys = (32 + sum(range(40, 50)) * 2) * engine.bytes_per_token  # the first prompt in two chunks
    assert m.bytes_read == weights + keys
    assert m.share_of(1e9) == m.bytes_read / m.seconds / 1e9


def test_bytes_per_step(tmp_path: Path) -> None:
    for name, weights in (("llama", "dense"), ("llama-biases-tied", "dense"), ("llama-biases-tied", "int8")):
        theirs = random_model(name)
        theirs.save_pretrained(tmp_path)
        model = Llama.from_pretrained(tmp_path, weights)
        table = theirs.get_input_embeddings().weight.nbytes
        every = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
        assert model.bytes_per_step == every - (0 if model.shares_embedding else table)


@pytest.mark.full
def test_soak() -> None:
    """A short one; `make soak` runs 10,000 requests."""
    report = soak(300, seed=1)
    assert report["preemptions"] > 5
    assert report["cancelled"] > 5
    assert report["reused_tokens"] > 300
    assert report["finishes"].get("error", 0) == 0


# ---- BlockManager ----


def test_blocks_are_shared_kept_and_reused() -> None:
    blocks = BlockManager(4, 2)
    a = [blocks.allocate(), blocks.allocate()]
    first = blocks.cache_full_blocks(a[:1], ROOT, [1, 2])
    assert blocks.cache_full_blocks(a[1:], first, [3, 4]) != first
    assert blocks.match([1, 2, 3, 4, 5])[0] == a
    assert blocks.is_shared(a[0])
    blocks.release(a)
    blocks.release(a)
    assert (blocks.free, blocks.kept) == (4, 2)
    assert blocks.match([1, 2, 3, 4]) == ([a[0]], first)  # a token is left to compute
    assert blocks.match([9, 9, 9]) == ([], ROOT)
    assert blocks.match([3, 4, 5]) == ([], ROOT)  # the same tokens behind others are others
    others = [blocks.allocate() for _ in range(3)]
    assert a[1] in others  # what was freed first and is not held
    assert blocks.match([1, 2, 3, 4, 5])[0] == [a[0]]
    with pytest.raises(OutOfBlocks):
        blocks.allocate()


def test_blocks_with_the_same_tokens() -> None:
    """The first block stays cached; the second one gets its identity."""
    blocks = BlockManager(4, 1)
    a, b = blocks.allocate(), blocks.allocate()
    identity = blocks.cache_full_blocks([a], ROOT, [5])
    assert blocks.cache_full_blocks([b], ROOT, [5]) == identity
    blocks.release([b])
    assert blocks.kept == 0
    blocks.release([a])
    assert blocks.kept == 1


def test_blocks_without_reuse() -> None:
    blocks = BlockManager(2, 1, reuse=False)
    a = blocks.allocate()
    blocks.cache_full_blocks([a], ROOT, [5])
    blocks.release([a])
    assert blocks.match([5, 6]) == ([], ROOT)
    assert blocks.free == 2
    with pytest.raises(ValueError, match=r"BlockManager: block_size must be at least 1, got 0"):
        BlockManager(1, 0)
