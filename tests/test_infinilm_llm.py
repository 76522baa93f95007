"""infinilm.llm: LLM, LLMEngine and AsyncLLMEngine give the engine's tokens under InfiniLM's names; what they refuse.

The soak serves the same requests through AsyncLLMEngine as through LLM.generate, some of them cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from support import async_soak
from support.rounding import greedy_tokens
from torch_infini.compat.infinilm import llm as door
from torch_infini.compat.infinilm.llm import (
    LLM,
    AsyncLLMEngine,
    BlockManager,
    EngineConfig,
    FinishReason,
    InferenceRequest,
    LLMEngine,
    RequestStatus,
    SamplingParams,
    TokenOutput,
)
from torch_infini.compat.infinilm.llm import config as config_module
from torch_infini.compat.infinilm.llm.request import Outbox, SampleDelta
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 24
PROMPTS = ["hello world", "naïve café ☕", "x"]
SIZES: dict[str, Any] = {"device": "cpu", "dtype": None, "num_blocks": 64, "max_tokens": NEW}
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """The tokens that transformers continues each prompt with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **SIZES)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[AsyncLLMEngine]:
    """An engine that runs, and has all its blocks back after each test."""
    engine = AsyncLLMEngine(EngineConfig(folder, **SIZES))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        engine: AsyncLLMEngine = request.getfixturevalue("served")
        asyncio.run(async_soak.until_idle(engine.metrics))
        assert engine.metrics().free_blocks == engine.metrics().blocks


async def read(engine: AsyncLLMEngine, request: InferenceRequest, **limits: float) -> list[TokenOutput]:
    return [output async for output in engine.stream_request(request, **limits)]


# ---- names and signatures ----


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("llm", "LLM LLMEngine AsyncLLMEngine EngineConfig SamplingParams Scheduler BlockManager FinishReason"),
        ("llm", "InferenceRequest RequestStatus RequestOutput TokenOutput CompletionOutput SchedulerOutput Block"),
        ("llm.llm", "LLM LLMEngine AsyncLLMEngine EngineConfig"),
        ("llm.request", "FinishReason InferenceRequest RequestStatus RequestOutput TokenOutput"),
        ("llm.sampling_params", "SamplingParams"),
        ("llm.scheduler", "Scheduler SchedulerOutput"),
        ("llm.cache_manager", "BlockManager Block"),
        ("", "LLM AsyncLLMEngine SamplingParams RequestOutput TokenOutput"),
    ],
)
def test_names(module: str, names: str) -> None:
    found = importlib.import_module(f"torch_infini.compat.infinilm.{module}".rstrip("."))
    for name in names.split():
        assert getattr(found, name) is getattr(door, name), name


def test_signatures() -> None:
    assert str(inspect.signature(LLM)).replace("'", "").partition(" -> ")[0] == (
        "(model_path: Any, device: Any = None, dtype: Any = float16, tensor_parallel_size: int = 1, "
        "max_batch_size: int = 16, max_tokens: int = 4096, num_blocks: int = 8192, block_size: int = 16, "
        "temperature: float = 1.0, top_p: float = 0.8, top_k: int = 1, cache_type: str = paged, "
        "max_cache_len: int = 4096, enable_graph: bool = True, **settings: Any)"
    )
    assert inspect.signature(EngineConfig).parameters.keys() == inspect.signature(LLM).parameters.keys()
    arguments = lambda call: [*inspect.signature(call).parameters][1:]
    assert arguments(LLM.generate) == ["prompts", "sampling_params", "use_tqdm"]
    assert arguments(LLM.chat) == ["messages", "sampling_params", "use_tqdm"]
    for engine in (LLMEngine, AsyncLLMEngine):
        assert arguments(engine.add_request) == ["prompt", "prompt_token_ids", "sampling_params", "request_id"]
        assert arguments(engine.add_chat_request) == ["messages", "sampling_params", "request_id"]
    assert arguments(AsyncLLMEngine.stream_request)[:2] == ["request", "timeout"]


def test_sampling_params() -> None:
    params = SamplingParams(0.5, 0.9, 7, 11, ["a"], [3], True)
    assert vars(params.resolve(None)) == vars(
        torch_infini.SamplingParams(
            temperature=0.5, top_p=0.9, top_k=7, max_tokens=11, stop=["a"], stop_token_ids=[3], ignore_eos=True
        )
    )
    default = SamplingParams()
    assert (default.temperature, default.top_p, default.top_k, default.max_tokens) == (1.0, 0.8, 1, None)
    assert default.resolve(5).max_tokens == 5 and params.resolve(5).max_tokens == 11
    copy = params.clone()
    assert copy == params and copy is not params
    copy.max_tokens = 3
    assert (copy.resolve(None).max_tokens, params.max_tokens) == (3, 11)
    with pytest.raises(ValueError, match="top_p must be a number from 0 to 1, got 2"):
        SamplingParams(top_p=2)
    copy.top_k = -2
    with pytest.raises(ValueError, match="top_k must be an integer of at least 0, got -2"):
        copy.resolve(None)


@pytest.mark.parametrize("name", ["Block", "SchedulerOutput"])
def test_names_without_a_counterpart_say_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"infinilm.llm.{name}: it must not be instantiated"):
        getattr(door, name)()


# ---- LLM ----


@pytest.mark.parametrize("cache", [{}, {"cache_type": "static", "max_batch_size": 2, "max_cache_len": 100}], ids=str)
def test_generate(folder: Path, alone: list[list[int]], cache: dict[str, Any]) -> None:
    llm = LLM(folder, **{**SIZES, **cache})
    outputs = llm.generate(PROMPTS)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    assert [output.prompt for output in outputs] == PROMPTS
    for output, tokens in zip(outputs, alone, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == output.token_ids == tokens
        assert completion.text == output.text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert output.finished and output.finish_reason is completion.finish_reason is FinishReason.LENGTH
        assert output.request_id and output.prompt_token_ids == tokenizer(output.prompt)["input_ids"]
    ids = outputs[0].prompt_token_ids
    assert llm.generate(ids)[0].token_ids == alone[0]
    each = [SamplingParams(max_tokens=2), torch_infini.SamplingParams.greedy(max_tokens=3)]
    assert [output.token_ids for output in llm.generate([ids, PROMPTS[1]], each)] == [alone[0][:2], alone[1][:3]]
    metrics = llm.metrics()
    assert metrics.blocks == (14 if cache else 64) and metrics.free_blocks == metrics.blocks
    if cache:
        (long,) = llm.generate([ids], ENDLESS)
        assert len(long.prompt_token_ids) + len(long.token_ids) == 100


def test_the_engines_defaults(folder: Path) -> None:
    llm = LLM(folder, **{**SIZES, "max_tokens": 5}, temperature=20.0, top_p=1.0, top_k=0)
    runs = [llm.generate(PROMPTS[0])[0].token_ids for _ in range(3)]
    assert all(len(tokens) == 5 for tokens in runs) and not runs[0] == runs[1] == runs[2]
    assert (
        llm.generate(PROMPTS[0], SamplingParams())[0].token_ids
        == llm.generate(PROMPTS[0], SamplingParams())[0].token_ids
    )


def test_why_outputs_end(llm: LLM, alone: list[list[int]]) -> None:
    tokens = alone[0]
    text = llm.generate(PROMPTS[0])[0].text
    ends = [SamplingParams(stop=text[3:5]), SamplingParams(stop_token_ids=[tokens[4]]), SamplingParams(max_tokens=3)]
    outputs = llm.generate([PROMPTS[0]] * 3, ends)
    assert [output.finish_reason for output in outputs] == ["stop_string", "eos_token", "length"]
    assert outputs[0].text == text[: text.index(text[3:5])]


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None and tokenizer.decode(answer.prompt_token_ids) == "user: hi\nassistant:"
    assert [output.token_ids for output in llm.chat([messages, messages])] == [answer.token_ids] * 2
    with pytest.raises(ValueError, match="messages must be a list of mappings"):
        llm.chat("hi")  # type: ignore[arg-type]


def test_the_bar_counts_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(PROMPTS, use_tqdm=False)
    assert capsys.readouterr().err == ""
    if importlib.util.find_spec("tqdm") is not None:
        llm.generate(PROMPTS)
        assert "3/3" in capsys.readouterr().err


def test_a_token_costs_no_call_of_this_package(llm: LLM) -> None:
    """Functions that Python calls between 8 and 24 tokens are as many through the door as by torch_infini.LLM."""

    def calls(generate: Callable[..., Any], params: Callable[..., Any], tokens: int) -> int:
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            generate(PROMPTS[0], params(max_tokens=tokens))
        finally:
            sys.setprofile(None)
        return count

    def added(generate: Callable[..., Any], params: Callable[..., Any]) -> int:
        return calls(generate, params, NEW) - calls(generate, params, 8)

    ours, theirs = (llm.generate, SamplingParams.greedy), (llm.engine.llm.generate, torch_infini.SamplingParams.greedy)
    added(*ours), added(*theirs)  # what is done once
    assert 0 < added(*ours) == added(*theirs)


# ---- LLMEngine ----


def test_steps(folder: Path, alone: list[list[int]]) -> None:
    engine = LLMEngine(EngineConfig(folder, **SIZES))
    requests = [engine.add_request(prompt) for prompt in PROMPTS[:2]]
    made = InferenceRequest("mine", prompt_token_ids=engine.tokenizer(PROMPTS[2])["input_ids"])  # type: ignore[misc]
    assert made.status is RequestStatus.WAITING and not made.is_finished()
    assert engine.add_request(made) is made
    requests.append(made)
    told = []
    while engine.has_unfinished_requests():
        changed = engine.step()
        told.append(len(changed))
        if len(told) == 3:
            assert {request.status for request in requests} == {RequestStatus.RUNNING}
            assert [request.generated_token_ids for request in requests] == [tokens[:3] for tokens in alone]
            assert requests[0].finish_reason is None and not requests[0].to_request_output().finished
    assert told == [3] * NEW
    assert [request.generated_token_ids for request in requests] == alone
    assert all(request.status is RequestStatus.FINISHED and request.is_finished() for request in requests)
    assert made.to_request_output().request_id == made.request_id == "mine" and not made.abort()
    assert requests[0].generated_text == requests[0].to_request_output().outputs[0].text

    chat = engine.add_chat_request([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2), "chat")
    long = engine.add_request(PROMPTS[0], sampling_params=ENDLESS)
    engine.step()
    with pytest.raises(ValueError, match="id must not be that of an unfinished request, got 'chat'"):
        engine.add_request(PROMPTS[0], request_id="chat")
    with pytest.raises(ValueError, match="a request must be added once"):
        engine.add_request(long)
    assert engine.abort_request(long) and not engine.abort_request(long) and not engine.abort_request("nobody")
    assert (long.status, long.finish_reason) == (RequestStatus.CANCELED, FinishReason.CANCELED)
    while engine.has_unfinished_requests():
        engine.step()
    assert len(chat.generated_token_ids) == 2 and engine.metrics().free_blocks == engine.metrics().blocks


def test_scheduler(folder: Path) -> None:
    """What scripts read of it follows the engine's own."""
    engine = LLMEngine(EngineConfig(folder, **{**SIZES, "max_batch_size": 2}))
    scheduler, size = engine.scheduler, EngineConfig.block_size
    assert (scheduler.max_batch_size, scheduler.num_blocks, scheduler.block_size) == (2, SIZES["num_blocks"], size)
    assert isinstance(scheduler.cache_manager, BlockManager) and scheduler.preemptions == 0
    requests = [engine.add_request(prompt) for prompt in PROMPTS]
    assert (len(scheduler.waiting), len(scheduler.running)) == (3, 0)
    engine.step()
    assert (len(scheduler.waiting), len(scheduler.running)) == (1, 2)
    prompts = [list(request.prompt_token_ids) for request in requests]
    assert [sequence.tokens[: len(ids)] for sequence, ids in zip(scheduler.running, prompts)] == prompts[:2]
    assert scheduler.cache_manager.free < scheduler.num_blocks
    while engine.has_unfinished_requests():
        engine.step()
    assert (scheduler.waiting, scheduler.running) == ([], []) and scheduler.cache_manager.free == scheduler.num_blocks


def test_steps_beside_generate(llm: LLM, alone: list[list[int]]) -> None:
    """A request of the engine goes on in the steps of generate, and the other way round."""
    request = llm.engine.add_request(PROMPTS[1])
    stream = llm.engine.llm.stream(PROMPTS[0], torch_infini.SamplingParams.greedy(max_tokens=NEW))
    outputs = [next(stream)]
    llm.engine.step()
    outputs += stream
    assert [token for output in outputs for token in output.outputs[0].new_token_ids] == alone[0]
    assert len(outputs) == NEW
    assert request.generated_token_ids == alone[1] and llm.engine.has_unfinished_requests()
    assert llm.engine.step() == [request] and not llm.engine.has_unfinished_requests()


# ---- AsyncLLMEngine ----


def test_async(served: AsyncLLMEngine, alone: list[list[int]]) -> None:
    async def run() -> None:
        requests = [served.add_request(prompt) for prompt in PROMPTS]
        for request, outputs, tokens in zip(
            requests, await asyncio.gather(*(read(served, request) for request in requests)), alone, strict=True
        ):
            assert [output.token_id for output in outputs] == request.generated_token_ids == tokens
            assert "".join(output.token_text for output in outputs) == request.generated_text
            assert outputs[-1].generated_text == request.generated_text
            assert [output.finished for output in outputs] == [False] * (NEW - 1) + [True]
            assert outputs[-1].finish_reason is FinishReason.LENGTH and outputs[-1].request_id == request.request_id
        chat = served.add_chat_request([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
        assert len(await read(served, chat)) == 2
        two = served.add_request(PROMPTS[0], sampling_params=SamplingParams(n=2, max_tokens=4))
        outputs = await read(served, two)
        for index in (0, 1):
            assert [output.token_id for output in outputs if output.index == index] == alone[0][:4]
        assert sum(output.finished for output in outputs) == 2

    asyncio.run(run())


def test_from_threads(served: AsyncLLMEngine, alone: list[list[int]]) -> None:
    """Requests are added on one thread and read in event loops of others."""
    requests = [(i, served.add_request(PROMPTS[i])) for i in (0, 1, 2) * 3]
    tokens: list[tuple[int, list[int | None]]] = []

    def run(i: int, request: InferenceRequest) -> None:
        tokens.append((i, [output.token_id for output in asyncio.run(read(served, request))]))

    threads = [threading.Thread(target=run, args=pair) for pair in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 9 and all(found == alone[i] for i, found in tokens)


def test_cancelled(served: AsyncLLMEngine) -> None:
    async def run() -> None:
        requests = [served.add_request(prompt, sampling_params=ENDLESS) for prompt in (*PROMPTS, *PROMPTS)]
        left, by_id, by_itself, late, slow, task_request = requests
        async for _ in (stream := served.stream_request(left)):
            break
        await stream.aclose()  # type: ignore[attr-defined]
        async for output in served.stream_request(by_id):
            if output.token_id is not None and len(by_id.generated_token_ids) > 2:
                served.abort(by_id.request_id)
        assert output == TokenOutput(by_id.request_id, None, "", True, FinishReason.CANCELED, output.generated_text)
        assert by_itself.abort() and not by_itself.abort() and not served.abort(by_itself)
        assert (await read(served, by_itself))[-1].finish_reason is FinishReason.CANCELED
        assert (await read(served, late, request_timeout=0.0))[-1].finish_reason is FinishReason.TIMEOUT
        assert (await read(served, slow, timeout=1e-9))[-1].finish_reason is FinishReason.TIMEOUT
        task = asyncio.create_task(read(served, task_request))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        statuses = [request.status for request in requests]
        assert statuses == [*[RequestStatus.CANCELED] * 3, *[RequestStatus.TIMEOUT] * 2, RequestStatus.CANCELED]
        assert late.to_request_output().finish_reason is FinishReason.TIMEOUT
        again = served.add_request(PROMPTS[0], request_id=left.request_id)  # the id is free
        assert len(await read(served, again, timeout=60.0, request_timeout=60.0)) == NEW

    asyncio.run(run())


def test_the_id_is_free_when_the_reader_learns_of_the_end(served: AsyncLLMEngine) -> None:
    request = served.add_request(PROMPTS[0], request_id="again")
    put, is_free = request.outbox.put, []

    def look_and_put(part: Any) -> None:
        if part.reason is not None:
            is_free.append(request.request_id not in served._requests)
        put(part)

    request.outbox.put = look_and_put  # type: ignore[method-assign]
    assert len(asyncio.run(read(served, request))) == NEW and is_free == [True]


def test_a_part_that_comes_before_its_reader_waits() -> None:
    """Between the look at an empty outbox and the wait for the next part, the engine's thread may add one."""
    part = SampleDelta(0, [1], "a", None)

    async def run() -> None:
        box, loop = Outbox(), asyncio.get_running_loop()
        make = loop.create_future

        def put_and_make() -> asyncio.Future[Any]:
            loop.create_future = make  # type: ignore[method-assign]
            box.put(part)
            return make()

        loop.create_future = put_and_make  # type: ignore[method-assign]
        until = loop.time() + 2
        assert await box.get(until) == part and loop.time() < until

    asyncio.run(run())


def test_stopped_and_started_again(folder: Path, alone: list[list[int]]) -> None:
    engine = AsyncLLMEngine(folder, **SIZES)
    with pytest.raises(RuntimeError, match="the engine must have been started"):
        engine.add_request(PROMPTS[0])
    engine.stop()
    assert not engine.is_running

    async def run() -> None:
        engine.start()
        engine.start()
        assert engine.is_running
        request = engine.add_request(PROMPTS[0], sampling_params=ENDLESS)
        task = asyncio.create_task(read(engine, request))
        while not request.generated_token_ids:
            await asyncio.sleep(0.001)
        engine.stop()
        assert (await task)[-1].finish_reason is FinishReason.CANCELED and request.error is None
        assert engine.metrics().free_blocks == engine.metrics().blocks
        with pytest.raises(RuntimeError, match="the engine must have been started"):
            engine.add_request(PROMPTS[0])
        engine.start()
        outputs = await read(engine, engine.add_request(PROMPTS[0]))
        assert [output.token_id for output in outputs] == alone[0]

    asyncio.run(run())
    engine.stop()


def test_an_engine_that_fails(folder: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers get the error, later callers too; started again it serves."""
    engine = AsyncLLMEngine(folder, **SIZES)

    def fail() -> Any:
        raise OSError("no more")

    async def run() -> None:
        engine.start()
        request = engine.add_request(PROMPTS[0], sampling_params=ENDLESS)
        async for _ in engine.stream_request(request):
            break
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.llm.engine, "step", fail)
            request = engine.add_request(PROMPTS[0], sampling_params=ENDLESS)
            with pytest.raises(RuntimeError, match="the engine failed: no more"):
                await read(engine, request, timeout=60.0)
            assert request.status is RequestStatus.FAILED and request.error is not None and "no more" in request.error
            assert not engine.is_running
            with pytest.raises(RuntimeError, match="must be running, got one that failed"):
                engine.add_request(PROMPTS[0])
        engine.start()
        assert [output.token_id for output in await read(engine, engine.add_request(PROMPTS[1]))] == alone[1]
        assert engine.metrics().free_blocks == engine.metrics().blocks

    asyncio.run(run())
    engine.stop()


def test_an_engine_that_is_dropped(folder: Path) -> None:
    before = threading.active_count()
    engine = AsyncLLMEngine(folder, **SIZES)
    engine.start()
    request = engine.add_request(PROMPTS[0])
    asyncio.run(read(engine, request))
    assert threading.active_count() == before + 1
    del engine
    gc.collect()
    assert threading.active_count() == before and len(request.generated_token_ids) == NEW


def test_soak(tmp_path: Path) -> None:
    async_soak.save_model(tmp_path)
    jobs = async_soak.random_jobs(200, seed=1)
    results, metrics = async_soak.through_infinilm(tmp_path, jobs)
    wanted = async_soak.expected(tmp_path, jobs)
    report = async_soak.check(results, wanted, jobs, metrics)
    assert report["cancelled"] > 10 and report["reused_tokens"] > 0
    whole = next(i for i, result in enumerate(results) if result.is_whole)
    for fault in ({"texts": ["?"]}, {"is_whole": False}):
        with pytest.raises(AssertionError):
            wrong = [r._replace(**fault) if i == whole else r for i, r in enumerate(results)]
            async_soak.check(wrong, wanted, [job._replace(cancel_at=None) for job in jobs], metrics)


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"prompt": ""}, "prompt must have at least one token"),
        ({}, "prompt must be text or token ids, got None"),
        ({"prompt": 3}, "prompt must be text or token ids, got 3"),
        ({"prompt_token_ids": [10**6]}, "prompt must be token ids from 0 to 319"),
        ({"prompt_token_ids": [True]}, "prompt must be token ids from 0 to 319"),
        ({"prompt_token_ids": [1] * 600}, "prompt must be shorter than 512"),
        ({"prompt": "x", "sampling_params": {"top_k": 1}}, "sampling_params must be SamplingParams or None"),
        ({"prompt": "x", "sampling_params": SamplingParams(stop_token_ids=[320])}, "must name tokens from 0 to 319"),
        ({"prompt": "x", "request_id": 3}, "request_id must be a string or None, got 3"),
    ],
    ids=str,
)
def test_requests_that_are_refused(
    served: AsyncLLMEngine, llm: LLM, alone: list[list[int]], arguments: dict[str, Any], rule: str
) -> None:
    for engine in (served, llm.engine):
        with pytest.raises(ValueError, match=re.escape(rule)):
            engine.add_request(**arguments)
        assert engine.metrics().running == engine.metrics().waiting == 0
    assert [output.token_id for output in asyncio.run(read(served, served.add_request(PROMPTS[2])))] == alone[2]


def test_reads_that_are_refused(served: AsyncLLMEngine) -> None:
    async def run() -> None:
        for bad in (None, "id", InferenceRequest(prompt="x")):
            with pytest.raises(ValueError, match="request must be one of add_request"):
                await read(served, bad)  # type: ignore[arg-type]
        request = served.add_request("x", sampling_params=ENDLESS, request_id="once")
        with pytest.raises(ValueError, match="request_id must be that of no request that goes on, got 'once'"):
            served.add_request("x", request_id="once")
        with pytest.raises(ValueError, match="must be None where an InferenceRequest is given"):
            served.add_request(InferenceRequest(prompt="x"), request_id="two")
        task = asyncio.create_task(read(served, request))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="request must have one reader"):
            await read(served, request)
        served.abort(request)
        await task
        with pytest.raises(ValueError, match="tokenizer|messages"):
            served.add_chat_request([])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"cache_type": "dynamic"}, 'cache_type must be "paged" or "static", got \'dynamic\''),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"max_batch_size": True}, "max_batch_size must be an integer of at least 1, got True"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1 or None, got 0"),
        ({"tensor_parallel_size": 1.0}, "tensor_parallel_size must be an integer of at least 1, got 1.0"),
        ({"top_p": -1.0}, "top_p must be a number from 0 to 1, got -1.0"),
        ({"enable_graph": None}, "enable_graph must be True or False, got None"),
        ({"device": "mlu"}, "device must be cpu"),
        ({"dtype": "float64"}, "dtype must be float32, bfloat16 or float16, got 'float64'"),
        ({"max_num_seqs": 4}, "max_num_seqs must be given as max_batch_size, got 4"),
    ],
    ids=str,
)
def test_configs_that_are_refused(folder: Path, fields: dict[str, Any], rule: str) -> None:
    for make in (LLM, AsyncLLMEngine):
        with pytest.raises(ValueError, match=re.escape(rule)):
            make(folder, **{**SIZES, **fields})


def test_other_ways_to_fail(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path, **SIZES)
    with pytest.raises(ValueError, match="got no_such=1"):
        LLM(folder, **SIZES, no_such=1)
    with pytest.raises(ValueError, match="config must be an EngineConfig"):
        LLMEngine(str(folder))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fields must not be given beside an EngineConfig, got num_blocks"):
        AsyncLLMEngine(EngineConfig(folder, **SIZES), num_blocks=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device must be cpu, for torch finds no NVIDIA GPU, got 'cuda'"):
        LLM(folder, **{**SIZES, "device": "cuda"})
    assert LLM(folder, **{**SIZES, "device": None}).engine.llm.engine.model.embed.weight.device.type == "cpu"


def test_what_the_engine_is_told(folder: Path) -> None:
    arguments = EngineConfig(folder, **SIZES, tensor_parallel_size=2, enable_graph=False, settings={"chunk_size": 64})
    found = arguments.arguments()
    assert (found["tensor_parallel_size"], found["enforce_eager"], found["chunk_size"]) == (2, True, 64)
    assert (found["max_num_seqs"], found["cache_blocks"], found["block_size"]) == (16, 64, 16)


def test_a_cache_beyond_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens of 3 layers, 2 heads of 16 columns, keys and values in float32: 12288 bytes a block."""
    monkeypatch.setattr(config_module, "free_memory", lambda device: 10 * 12288 + 1)
    rule = "num_blocks must fit into memory, where 10 blocks of 16 tokens do (0.0 GiB are free), got 11 blocks"
    with pytest.raises(MemoryError, match=re.escape(rule)):
        LLM(folder, **{**SIZES, "num_blocks": 11})
    with pytest.raises(MemoryError, match="max_batch_size rows of max_cache_len must fit into memory"):
        LLM(folder, **SIZES, cache_type="static", max_cache_len=32)
    assert LLM(folder, **{**SIZES, "num_blocks": 10}).metrics().blocks == 10
    assert LLM(folder, **{**SIZES, "num_blocks": 11, "cache_bytes": 5 * 12288}).metrics().blocks == 5
    assert LLM(folder, **{**SIZES, "num_blocks": 18, "kv_cache_dtype": "int8"}).metrics().blocks == 18
    monkeypatch.undo()
    free = config_module.free_memory(torch.device("cpu"))
    assert free is not None and 1 << 20 < free < 1 << 50
