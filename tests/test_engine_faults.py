"""Faults in the engine: a tokenizer that fails, interrupts at any line, streams that are never read, hostile calls.

Each ends one request at most: the others get the tokens that they get without it, and every block is free in the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch

import torch_infini.engine
from support.engines import small_engine
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.engine import Engine, EngineConfig, sampler
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams.greedy(max_tokens=12, ignore_eos=True)
PROMPTS = ["hello world", "naïve café ☕", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


def all_free(llm: LLM) -> bool:
    metrics = llm.metrics()
    return metrics.free_blocks == metrics.blocks and metrics.running == metrics.waiting == 0


# ---- a tokenizer that fails ----


class Failing:
    """A tokenizer that cannot decode one token: it raises, or gives what is no text."""

    def __init__(self, tokenizer: Any, token: int, failure: Any) -> None:
        self._tokenizer, self._token, self._failure = tokenizer, token, failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def decode(self, tokens: Any, **options: Any) -> Any:
        if self._token not in tokens:
            return self._tokenizer.decode(tokens, **options)
        if isinstance(self._failure, Exception):
            raise self._failure
        return self._failure


FAILURES = [
    (TypeError("sequence item 0: expected str instance, NoneType found"), "TypeError: sequence item 0: expected str"),
    (KeyError(5), "KeyError: 5"),
    (OverflowError("out of range integral type"), "OverflowError: out of range"),
    (None, "decode must return a str, got None"),
]


def of_one(llm: LLM) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, and one that is generated for the first prompt alone."""
    tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    prompts = [llm.engine.prompts.encode(prompt) for prompt in PROMPTS]
    others = {*tokens[1], *tokens[2], *(token for prompt in prompts for token in prompt)}
    return tokens, next(token for token in tokens[0][2:] if token not in others)


@pytest.mark.parametrize("failure, cause", FAILURES, ids=lambda value: type(value).__name__)
def test_a_token_that_cannot_be_decoded(failure: Any, cause: str, folder: Path) -> None:
    llm = LLM(folder)
    want, token = of_one(llm)
    llm.engine.prompts.tokenizer = Failing(llm.engine.tokenizer, token, failure)
    for _ in range(2):
        first, *others = llm.generate(PROMPTS, GREEDY)
        (completion,) = first.outputs
        assert completion.finish_reason == "error"
        assert completion.error is not None
        assert "torch_infini.Engine: the tokenizer must decode every token" in completion.error
        assert cause in completion.error
        assert f"token {token}" in completion.error
        assert completion.token_ids == want[0][: len(completion.token_ids)]
        assert [output.token_ids for output in others] == want[1:]
        last = list(llm.stream(PROMPTS[0], GREEDY))[-1].outputs[0]
        assert (last.finish_reason, last.error) == ("error", completion.error)
        assert all_free(llm)


def test_a_prompt_that_cannot_be_decoded(folder: Path) -> None:
    """With its output, the end of the prompt is decoded: that fails for the request alone, too."""
    llm = LLM(folder)
    tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    mine = set(llm.engine.prompts.encode(PROMPTS[0]))
    others = {*tokens[1], *tokens[2], *llm.engine.prompts.encode(PROMPTS[1]), *llm.engine.prompts.encode(PROMPTS[2])}
    llm.engine.prompts.tokenizer = Failing(llm.engine.tokenizer, min(mine - others), ValueError("no such token"))
    outputs = llm.generate(PROMPTS, GREEDY)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "ValueError: no such token" in str(outputs[0].outputs[0].error)
    assert [output.token_ids for output in outputs[1:]] == tokens[1:]
    assert all_free(llm)


def test_a_text_that_cannot_be_encoded(folder: Path) -> None:
    llm = LLM(folder)
    (want,) = llm.generate(PROMPTS[0], GREEDY)

    class Broken(Failing):
        def __call__(self, text: str, **options: Any) -> Any:
            if text == "broken":
                raise RuntimeError("no such text")
            return self._tokenizer(text, **options)

    llm.engine.prompts.tokenizer = Broken(llm.engine.tokenizer, -1, None)
    with pytest.raises(
        ValueError, match=r"the tokenizer must encode the prompt, got RuntimeError: no such text \(prompt 1\)"
    ):
        llm.generate([PROMPTS[0], "broken"], GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == want.token_ids
    assert all_free(llm)


@pytest.mark.parametrize("failure, cause", FAILURES[:1] + FAILURES[-1:], ids=lambda value: type(value).__name__)
def test_a_token_that_cannot_be_decoded_async(failure: Any, cause: str, folder: Path) -> None:
    want, token = of_one(LLM(folder))

    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            llm._llm.engine.prompts.tokenizer = Failing(llm._llm.engine.tokenizer, token, failure)
            for _ in range(2):
                first, *others = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
                assert first.outputs[0].finish_reason == "error"
                assert cause in str(first.outputs[0].error)
                assert [output.token_ids for output in others] == want[1:]
                last = [output async for output in llm.stream(PROMPTS[0], GREEDY)][-1]
                assert last.outputs[0].finish_reason == "error"
            assert all_free(llm._llm)

    asyncio.run(run())


@pytest.mark.parametrize("finish_by", ["length", "abort"])
def test_a_text_whose_end_fails(finish_by: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held back is decoded when a request ends: a failure there must not keep it from ending."""
    llm = LLM(folder)

    def fail(self: Any) -> str:
        raise LookupError("no end")

    monkeypatch.setattr(torch_infini.engine.text.TextStream, "finish", fail)
    if finish_by == "length":
        (completion,) = llm.generate(PROMPTS[0], GREEDY)[0].outputs
        assert completion.finish_reason == "error"
        assert "LookupError: no end" in str(completion.error)
    else:
        stream = llm.stream(PROMPTS[0], GREEDY)
        id = next(stream).request_id
        assert llm.engine.abort(id)
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
    assert all_free(llm)


@pytest.mark.parametrize("name", ["edit", "mask_unlikely", "most_likely", "log_softmax"])
def test_a_row_that_cannot_be_sampled(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder)
    want = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]

    def fail(*arguments: Any) -> Any:
        raise ArithmeticError("no such row")

    monkeypatch.setattr(sampler, name, fail)
    special = SamplingParams(temperature=0.7, min_p=0.1, logprobs=2, seed=1)
    outputs = llm.generate(PROMPTS, [special, GREEDY, GREEDY])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "ArithmeticError: no such row" in str(outputs[0].outputs[0].error)
    assert [output.token_ids for output in outputs[1:]] == want[1:]
    assert all_free(llm)


def test_a_step_that_raises_anything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of that step end with what was raised; the engine goes on."""
    llm = LLM(folder)
    (want,) = llm.generate(PROMPTS[0], GREEDY)
    for target, name in ((llm.engine._runner, "run"), (llm.engine, "_sampler")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, lambda *_: {}["nothing"])
            (completion,) = llm.generate(PROMPTS[0], GREEDY)[0].outputs
            assert completion.finish_reason == "error"
            assert "the step failed: KeyError: 'nothing'" in str(completion.error)
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == want.token_ids
        assert all_free(llm)


# ---- interrupts ----


class Interrupts:
    """Raises KeyboardInterrupt at one line of the engine's package, or tells the lines that a call goes through.

    Args:
        at: (file, line, how often it is reached before); None: nowhere.
    """

    def __init__(self, at: tuple[str, int, int] | None = None) -> None:
        self.at, self.seen = at, Counter[tuple[str, int]]()
        self.is_done = False

    def __enter__(self) -> Interrupts:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.is_done:
            line = frame.f_code.co_filename, frame.f_lineno
            if self.at == (*line, self.seen[line]):
                self.is_done = True
                raise KeyboardInterrupt
            self.seen[line] += 1
        return self._line

    def places(self, seed: int, most: int) -> list[tuple[str, int, int]]:
        """Each line that was reached, at one time of all those that it was, or at most so many of them."""
        chance = random.Random(seed)
        places = [(*line, chance.randrange(count)) for line, count in sorted(self.seen.items())]
        return places if len(places) <= most else chance.sample(places, most)


PACKAGE = str(Path(torch_infini.engine.__file__).parent)
# Shared prefixes, samples of one prompt, stop strings and log-probabilities, on so few blocks that some are preempted.
PREFIX = list(range(40, 60))
REQUESTS: list[tuple[Any, SamplingParams]] = [
    ([*PREFIX, 1, 2], GREEDY),
    ([*PREFIX, 3, 4, 5], SamplingParams(n=2, seed=3, max_tokens=9, logprobs=1)),
    ("hello world", SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=4, max_tokens=10, stop=["zzz", "q"])),
    ([7, 8, 9], SamplingParams.greedy(max_tokens=60)),
]


def serve(engine: Engine, interrupts: Interrupts) -> dict[str, list[tuple[list[int], str, str | None, Any]]]:
    """Requests that arrive one after the other, one of them cancelled; a call that is interrupted is made again."""
    given: dict[str, list[tuple[list[int], str, str | None, Any]]] = {}

    def again(call: Callable[[], Any]) -> Any:
        try:
            with interrupts:
                return call()
        except KeyboardInterrupt:
            return call()

    def step() -> None:
        for output in again(engine.step):
            told = given.setdefault(output.request_id, [])
            for c in output.outputs:
                tokens, text, finish, _ = told[c.index] if c.index < len(told) else ([], "", None, None)
                assert finish is None or not c.new_token_ids
                assert (tokens + c.new_token_ids, text + c.new_text) == (c.token_ids, c.text), (
                    "told twice, or not at all"
                )
                told[c.index : c.index + 1] = [
                    (c.token_ids, c.text, c.finish_reason, [p.logprob for p in c.token_logprobs or ()])
                ]

    for i, (prompt, params) in enumerate(REQUESTS):
        fresh = dataclasses.replace(params)  # nothing cached in it
        assert again(lambda: engine.add(prompt, fresh, str(i))) == str(i)  # noqa: B023
        step()
        step()
    for i in range(1000):
        if engine.is_idle:
            break
        if i == 8:
            again(lambda: engine.abort("3"))
        step()
    assert given.pop("3")[0][2] == "abort"
    return given


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("seed", range(2))
def test_interrupts_at_any_line_of_the_engine(seed: int, tmp_path: Path) -> None:
    """No block is lost, every request has its end told once, with the tokens, texts and log-probabilities that it has
    without an interrupt.
    """
    settings: dict[str, Any] = {
        "max_num_seqs": 6,
        "cache_blocks": 12,
        "block_size": 4,
        "chunk_size": 8,
        "enforce_eager": seed == 0,
    }
    model = small_engine(tmp_path)

    def engine() -> Engine:
        return Engine(model.model, model.tokenizer, EngineConfig(**settings))

    seen = Interrupts()
    first = engine()
    want = serve(first, seen)
    assert first.metrics().preemptions > 0
    assert all(finish in ("length", "stop") for request in want.values() for _, _, finish, _ in request)
    assert len(seen.seen) > 200
    for place in seen.places(seed, 80 if seed == 0 else 25):
        interrupted, served = Interrupts(place), engine()
        got = serve(served, interrupted)
        where = (Path(place[0]).name, *place[1:])
        assert interrupted.is_done, where
        for id, completions in want.items():
            for mine, theirs in zip(got[id], completions, strict=True):
                assert mine[:3] == theirs[:3], where
                assert mine[3] == (theirs[3] and pytest.approx(theirs[3], abs=1e-4)), where
        metrics = served.metrics()
        assert (metrics.free_blocks, metrics.running, metrics.waiting) == (metrics.blocks, 0, 0), where
        assert served._blocks._references == [0] * metrics.blocks, where
        assert len({*served._blocks._uncached, *served._blocks._kept}) == metrics.blocks, where


def test_interrupts_at_any_line_of_a_call(folder: Path) -> None:
    """A call of generate that is interrupted leaves nothing behind, and a stream beside it misses nothing."""
    llm = LLM(folder, cache_blocks=64, block_size=8, enforce_eager=True, enable_prefix_caching=False)
    params = SamplingParams.greedy(max_tokens=4, ignore_eos=True)

    def serve(interrupts: Interrupts) -> tuple[str, list[int]]:
        stream, text, tokens = llm.stream(PROMPTS[0], GREEDY), "", []
        for i, output in enumerate(stream):
            text += output.outputs[0].new_text
            tokens += output.outputs[0].new_token_ids
            if i == 1:
                try:
                    with interrupts:
                        llm.generate(PROMPTS[1:], params)
                except KeyboardInterrupt:
                    pass
        assert (text, tokens) == (output.text, output.token_ids)
        return text, tokens

    seen = Interrupts()
    serve(Interrupts())  # what is done once is done
    want = serve(seen)
    expected = [output.token_ids for output in llm.generate(PROMPTS, params)]
    for place in seen.places(0, 50):
        interrupted = Interrupts(place)
        assert serve(interrupted) == want, place
        assert interrupted.is_done, place
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected, place
        assert all_free(llm), place
        assert llm.engine.is_idle, place


def test_streams_that_are_never_started(folder: Path) -> None:
    llm = LLM(folder)
    streams = [llm.stream(PROMPTS[0], SamplingParams.greedy(max_tokens=None)) for _ in range(3)]
    assert llm.engine.is_idle
    (output,) = llm.generate(PROMPTS[1], GREEDY)
    del streams
    gc.collect()
    assert llm.engine.is_idle
    assert sum(llm.metrics().requests.values()) == 1
    assert list(llm.stream(PROMPTS[1], GREEDY))[-1].token_ids == output.token_ids
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        llm.stream([])

    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            streams = [llm.stream(PROMPTS[0], SamplingParams.greedy(max_tokens=None)) for _ in range(3)]
            assert (await llm.generate(PROMPTS[1], GREEDY)).token_ids == output.token_ids
            del streams
            gc.collect()
            assert llm._llm.engine.is_idle
            assert sum(llm.metrics().requests.values()) == 1

    asyncio.run(run())


def test_a_stream_that_is_dropped_in_the_midst_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close a stream anywhere, and a step that goes on is not disturbed."""
    llm = LLM(folder)
    want = llm.generate(PROMPTS[1], GREEDY)[0].token_ids
    streams = [llm.stream(PROMPTS[0], SamplingParams.greedy(max_tokens=None))]
    next(streams[0])
    run = llm.engine._runner.run

    def drop(*arguments: Any) -> Any:
        streams.clear()
        return run(*arguments)

    monkeypatch.setattr(llm.engine._runner, "run", drop)
    assert llm.generate(PROMPTS[1], GREEDY)[0].token_ids == want
    assert llm.metrics().requests["abort"] == 1
    assert all_free(llm)
    assert llm.engine.is_idle


# ---- hostile calls ----


def test_prompts_as_of_vllm(folder: Path) -> None:
    llm = LLM(folder)
    (want,) = llm.generate(PROMPTS[0], GREEDY)
    ids = want.prompt_token_ids
    for prompt in (
        {"prompt_token_ids": ids},
        {"prompt": PROMPTS[0]},
        {"prompt": PROMPTS[0], "prompt_token_ids": None},
        {"prompt": PROMPTS[0], "prompt_token_ids": ids},
        {"prompt_token_ids": ids, "multi_modal_data": None},
        torch.tensor(ids),
        numpy.array(ids),
        [{"prompt_token_ids": torch.tensor(ids)}],
        tuple(ids),
        torch.tensor([ids]),
    ):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.token_ids == want.token_ids
        has_text = isinstance(prompt, dict) and "prompt" in prompt
        assert output.prompt == (PROMPTS[0] if has_text else None)
    outputs = llm.generate([{"prompt": PROMPTS[1]}, PROMPTS[0], ids, {"prompt_token_ids": ids}], GREEDY)
    assert [output.token_ids == want.token_ids for output in outputs] == [False, True, True, True]
    assert list(llm.stream({"prompt_token_ids": ids}, GREEDY))[-1].token_ids == want.token_ids

    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            for prompt in ({"prompt_token_ids": ids}, {"prompt": PROMPTS[0]}):
                assert (await llm.generate(prompt, GREEDY)).token_ids == want.token_ids
            with pytest.raises(ValueError, match="prompt must be text, token ids, "):
                await llm.generate({"ids": ids})

    asyncio.run(run())


@pytest.mark.parametrize(
    "prompt, rule",
    [
        ({}, 'prompt must be text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, got {}'),
        ({"text": "x"}, 'prompt must be text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, got {\'text\''),
        ({"prompt": 5}, 'prompt must be text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, got'),
        ({"prompt": "x", "multi_modal_data": 1}, 'multi_modal_data must be {"image": image or images}, got int'),
        ({"prompt": "x", "mm_processor_kwargs": {}}, 'prompt must be text, token ids, {"prompt": text} or'),
        ({"prompt_token_ids": "x"}, "prompt must be text or token ids, got"),
        ({"prompt_token_ids": 3}, "prompt must be text or token ids, got"),
        ({"prompt_token_ids": [True]}, "prompt must be token ids from 0 to 319, got True"),
        ({"prompt_token_ids": []}, "prompt must have at least one token, got none"),
        ([True, False], "prompt must be token ids from 0 to 319, got True"),
        ([[1, 10**30]], f"prompt must be token ids from 0 to 319, got {10**30}"),
        ([[1, -1]], "prompt must be token ids from 0 to 319, got -1"),
        ([[1, "x"]], "prompt must be token ids from 0 to 319, got 'x'"),
        ([[1, None]], "prompt must be token ids from 0 to 319, got None"),
        ([[[1, 2], [3]]], "prompt must be token ids from 0 to 319, got [1, 2]"),
        (torch.ones(1, 2, 2, dtype=torch.int64), "prompt must be token ids from 0 to 319, got tensor([1, 1])"),
        (torch.tensor(5), "prompts must be a list of texts or token ids, got tensor(5)"),
        (torch.tensor([0.5]), "prompt must be token ids from 0 to 319, got tensor(0.5"),
        (b"abc", "prompts must be a list of texts or token ids, got b'abc'"),
        ([b"abc"], "prompt must be text or token ids, got b'abc'"),
        ({1, 2}, "prompts must be a list of texts or token ids, got {1, 2}"),
        (5, "prompts must be a list of texts or token ids, got 5"),
        ([None], "prompt must be text or token ids, got None"),
        ("", "prompt must have at least one token, got none"),
        ([""], "prompt must have at least one token, got none"),
        ([[]], "prompt must have at least one token, got none"),
        ([[1] * 600], "prompt must be shorter than 512 tokens"),
    ],
    ids=repr,
)
def test_prompts_that_are_none(prompt: Any, rule: str, shared_llm: LLM) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        shared_llm.generate(prompt, GREEDY)
    assert shared_llm.engine.is_idle
    assert all_free(shared_llm)


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(folder)


def test_ids_of_requests(shared_llm: LLM) -> None:
    engine = shared_llm.engine
    id = engine.add([1, 2], GREEDY, "mine")
    for bad, rule in (
        ("mine", "id must not be that of an unfinished request, got 'mine'"),
        (5, "id must be a string or None, got 5"),
        ([], "id must be a string or None, got []"),
    ):
        with pytest.raises(ValueError, match=re.escape(rule)):
            engine.add([1, 2], GREEDY, bad)
    for unknown in ("other", 5, [], None):
        assert not engine.abort(unknown)
    assert engine.abort(id)
    assert not engine.abort(id)
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert engine.is_idle


def test_limits_that_are_huge(shared_llm: LLM) -> None:
    params = SamplingParams.greedy(max_tokens=10**18, top_k=2**63 - 1, logprobs=10**18, stop_token_ids=[5], seed=10**40)
    (output,) = shared_llm.generate([[40, 41] * 220], params)
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert len(output.prompt_token_ids) + len(output.token_ids) <= 512
    assert all_free(shared_llm)


def test_a_step_of_another_caller(folder: Path) -> None:
    """Its outputs are not the stream's any more: a sentence instead of steps without end."""
    llm = LLM(folder)
    stream = llm.stream(PROMPTS[0], SamplingParams.greedy(max_tokens=2, ignore_eos=True))
    next(stream)
    while not llm.engine.is_idle:
        llm.engine.step()
    with pytest.raises(RuntimeError, match="the engine must be stepped only by the LLM"):
        next(stream)


def test_threads_that_fail_beside_others(folder: Path) -> None:
    """Two threads of one LLM: a request of one fails in the tokenizer, those of the other go on."""
    llm = LLM(folder)
    want, token = of_one(llm)
    llm.engine.prompts.tokenizer = Failing(llm.engine.tokenizer, token, ValueError("no such token"))
    got: dict[int, list[Any]] = {0: [], 1: []}

    def call(i: int) -> None:
        for _ in range(3):
            got[i] += llm.generate(PROMPTS[i], GREEDY)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [output.outputs[0].finish_reason for output in got[0]] == ["error"] * 3
    assert [output.token_ids for output in got[1]] == [want[1]] * 3
    assert all_free(llm)


@pytest.mark.parametrize(
    "settings, rule",
    [
        (
            {"n": 2**63},
            "n must be at most 9223372036854775807, the largest integer of 64 bits, got 9223372036854775808",
        ),
        ({"top_k": 10**30}, "top_k must be at most 9223372036854775807, the largest integer of 64 bits, got 1000"),
        ({"max_tokens": 10**30}, "max_tokens must be at most 9223372036854775807"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1 or None, got 0"),
        ({"logprobs": 2**64}, "logprobs must be at most 9223372036854775807"),
        ({"temperature": 1e39}, "temperature must be at most 3.40282e+38, the largest number of float32, got 1e+39"),
        ({"temperature": 10**400}, "temperature must be at most 3.40282e+38, the largest number of float32, got 1000"),
        ({"temperature": float("nan")}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number of at least 0, got inf"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be at most 3.40282e+38"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be at least 2.93874e-39, by the range of float32"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        (
            {"presence_penalty": -1e39},
            "presence_penalty must be at least -3.40282e+38, by the range of float32, got -1e",
        ),
        ({"frequency_penalty": 1e39}, "frequency_penalty must be at most 3.40282e+38"),
        ({"logit_bias": {1: 1e39}}, "logit_bias must have finite numbers of at most 3.40282e+38, either sign, or"),
        ({"logit_bias": {1: 10**400}}, "logit_bias must have finite numbers of at most 3.40282e+38, either sign, or"),
        ({"stop": ""}, "stop must be a string or strings, none of them empty, got ('',)"),
        ({"stop": ["a", ""]}, "stop must be a string or strings, none of them empty, got ('a', '')"),
    ],
    ids=repr,
)
def test_settings_name_the_bound_that_was_missed(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"torch_infini.SamplingParams: {rule}")):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings, error, rule",
    [
        (
            {"max_num_seqs": 10**30},
            ValueError,
            f"EngineConfig: max_num_seqs must be at most {2**63 - 1}, got {10**30}",
        ),
        ({"max_num_seqs": True}, ValueError, "EngineConfig: max_num_seqs must be an integer of at least 1, got True"),
        ({"max_num_seqs": None}, ValueError, "EngineConfig: max_num_seqs must be an integer of at least 1, got None"),
        ({"cache_blocks": 10**30}, ValueError, f"EngineConfig: cache_blocks must be at most {2**63 - 1}, got {10**30}"),
        ({"enforce_eager": "no"}, ValueError, "EngineConfig: enforce_eager must be True or False, got 'no'"),
        (
            {"cache_blocks": 2**62},
            MemoryError,
            f"Engine: cache and batch must fit into memory, got {2**62} blocks of 32",
        ),
        ({"cache_bytes": 2**62}, MemoryError, "Engine: cache and batch must fit into memory, got "),
        ({"max_num_seqs": 2**60, "cache_blocks": 4}, MemoryError, f"and max_num_seqs {2**60} (lower cache_bytes or"),
    ],
    ids=repr,
)
def test_engines_that_fit_no_machine(
    settings: dict[str, Any], error: type[Exception], rule: str, shared_llm: LLM
) -> None:
    with pytest.raises(error, match=re.escape(rule)):
        LLM(shared_llm.engine.model, **settings)


def test_too_many_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No process is started for them."""
    with pytest.raises(ValueError, match="size must be at most 64, the ranks of one machine, got 1000000"):
        LLM(folder, tensor_parallel_size=1_000_000)
    assert main(["generate", "--model", str(folder), "--threads", "1000000000000"]) == 2
    assert "--threads must be at most 1024, got 1000000000000" in capsys.readouterr().err


@pytest.mark.parametrize("bandwidth, cached", [(1.0, True), (1e30, False)])
def test_a_share_above_the_limit_comes_from_the_cache(
    bandwidth: float, cached: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch_infini._core.bandwidth.read_bandwidth", lambda: bandwidth)
    assert main(["generate", "--model", str(folder), "--max-new-tokens", "8", "--ignore-eos"]) == 0
    assert ("% of the bandwidth limit (from the cache) (the first" in capsys.readouterr().out) == cached
    monkeypatch.setattr("torch_infini.commands.demo_run.read_bandwidth", lambda: bandwidth)
    assert main(["demo", "--max-new-tokens", "2", "--runs", "1"]) == 0
    assert capsys.readouterr().out.count("of the memory-bandwidth limit (from the cache)\n") == (2 if cached else 0)


@pytest.mark.parametrize(
    "messages",
    [None, 5, "hello", [5], [[]], [{}], [{"content": "x"}], [[{"role": "user", "content": "x"}], "y"]],
    ids=repr,
)
def test_messages_that_are_none(messages: Any, shared_llm: LLM) -> None:
    rule = "torch_infini.LLM.chat: messages must be a list of mappings"
    with pytest.raises(ValueError, match=rule):
        shared_llm.chat(messages, GREEDY)
    assert shared_llm.chat([], GREEDY) == []
    assert shared_llm.engine.is_idle


def test_a_template_that_raises(folder: Path) -> None:
    llm = LLM(folder)
    llm.engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"chat: the chat template must take the messages, got .*roles must alternate"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY)


@pytest.mark.parametrize(
    "call, rule",
    [
        (
            lambda llm: llm.generate("x", 5),
            "LLM.generate: sampling_params must be SamplingParams, None, or a list of one for each",
        ),
        (
            lambda llm: llm.generate(["x"], iter([GREEDY])),
            "LLM.generate: sampling_params must be SamplingParams, None, or a list",
        ),
        (lambda llm: LLM(5), "torch_infini.LLM: model must be a folder, a Decoder or a model of transformers, got int"),
        (
            lambda llm: LLM(llm.engine.model, tensor_parallel_size=0),
            "tensor_parallel_size must be an integer of at least 1, got 0",
        ),
        (
            lambda llm: LLM("x", tensor_parallel_size=True),
            "tensor_parallel_size must be an integer of at least 1, got True",
        ),
        (
            lambda llm: LLM("x", device="nowhere"),
            "torch_infini.LLM: device must be cpu, cuda, cuda:N, or infini once it is enabled, got 'nowhere'",
        ),
        (
            lambda llm: LLM("x", device=None),
            "torch_infini.LLM: device must be cpu, cuda, cuda:N, or infini once it is enabled, got None",
        ),
        (
            lambda llm: LLM("x", device="cuda:99"),
            "torch_infini.LLM: device must be one that torch sees, got cuda:99 of",
        ),
        (
            lambda llm: Engine(None),
            "torch_infini.Engine: model must be a torch_infini.models.Decoder or PagedModel, got NoneType",
        ),
        (lambda llm: Engine(llm.engine.model, config=5), "Engine: config must be an EngineConfig or None, got 5"),
    ],
)
def test_arguments_of_another_type(call: Callable[[LLM], object], rule: str, shared_llm: LLM) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        call(shared_llm)
