"""A soak of the asynchronous front ends: the same random requests, some of them cancelled, in two processes.

One serves them through torch_infini.AsyncLLM, one through infinilm.llm.AsyncLLMEngine; LLM.generate gives the texts
that both must have.

PYTHONPATH=tests python -m support.async_soak --requests 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch_infini.compat.infinilm import llm as infinilm
from torch_infini.engine import LLM, AsyncLLM, Metrics, SamplingParams
from torch_infini.testing.checkpoints import SMALL, random_model, save_tokenizer

from .engines import resident_bytes

AT_A_TIME = 40
MOST = 24  # tokens of an output
# A cache that is too small for the requests, so that sequences are preempted.
SIZES: dict[str, Any] = {"max_num_seqs": 12, "cache_blocks": 28, "block_size": 8}
STEPS: dict[str, Any] = {"chunk_size": 16, "max_num_batched_tokens": 48}


class Job(NamedTuple):
    """A request.

    Attributes:
        prompt: Text or token ids.
        settings: Of both kinds of SamplingParams.
        cancel_at: Cancel it when it has this many tokens; None: never.
    """

    prompt: str | list[int]
    settings: dict[str, Any]
    cancel_at: int | None


class Result(NamedTuple):
    """What came of a job: the tokens and the text of each sample, and whether all samples ended by themselves."""

    tokens: list[list[int]]
    texts: list[str]
    is_whole: bool


def random_jobs(count: int, seed: int) -> list[Job]:
    """Return requests of all kinds, the same at every call: a seed makes their tokens repeatable."""
    chance = random.Random(seed)

    def token() -> int:
        return chance.randrange(SMALL["vocab_size"])

    prefixes = [[token() for _ in range(40)] for _ in range(4)]
    jobs = []
    for _ in range(count):
        tokens = chance.choice(prefixes)[: chance.randint(1, 40)] if chance.random() < 0.5 else []
        tokens = tokens + [token() for _ in range(chance.randint(1, 40))]
        text = "".join(chance.choice("abc xyz.") for _ in range(chance.randint(1, 30)))
        settings = {
            "n": chance.choice([1, 1, 1, 2]),
            "temperature": chance.choice([0.0, 0.7, 1.5]),
            "top_k": chance.choice([0, 1, 20]),
            "top_p": chance.choice([1.0, 0.9]),
            "repetition_penalty": chance.choice([1.0, 1.0, 1.2]),
            "seed": chance.randrange(1000),
            "stop": chance.choice([(), (), (), ("e", " w1")]),
            "stop_token_ids": tuple(token() for _ in range(chance.choice([0, 0, 2]))),
            "max_tokens": chance.randint(1, MOST),
        }
        cancel_at = chance.randint(1, 8) if chance.random() < 0.2 else None
        jobs.append(Job(text if chance.random() < 0.3 else tokens, settings, cancel_at))
    return jobs


def save_model(folder: Path) -> None:
    """Write the model and the tokenizer that all processes read."""
    model = random_model("llama")
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)


def expected(folder: Path, jobs: Sequence[Job]) -> list[Result]:
    """Return what LLM.generate makes of all jobs."""
    params = [SamplingParams(**job.settings) for job in jobs]
    outputs = LLM(folder, **SIZES, **STEPS).generate([job.prompt for job in jobs], params)
    return [Result([c.token_ids for c in o.outputs], [c.text for c in o.outputs], True) for o in outputs]


def through_async_llm(folder: Path, jobs: Sequence[Job]) -> tuple[list[Result], Metrics]:
    """Serve the jobs through torch_infini.AsyncLLM."""

    async def serve(llm: AsyncLLM, job: Job) -> Result:
        async with aclosing(llm.stream(job.prompt, SamplingParams(**job.settings))) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                tokens = [c.token_ids for c in output.outputs]
                if job.cancel_at is not None and sum(map(len, tokens)) >= job.cancel_at:
                    break
        return Result(tokens, [c.text for c in output.outputs], output.finished)

    async def run() -> tuple[list[Result], Metrics]:
        async with AsyncLLM(folder, **SIZES, **STEPS) as llm:
            results = await at_a_time(jobs, lambda job: serve(llm, job))
            await until_idle(llm.metrics)
            return results, llm.metrics()

    return asyncio.run(run())


def through_infinilm(folder: Path, jobs: Sequence[Job], loops: int = 2) -> tuple[list[Result], Metrics]:
    """Serve the jobs through infinilm.llm.AsyncLLMEngine, from several threads with an event loop each."""
    config = infinilm.EngineConfig(
        folder,
        "cpu",
        dtype=None,
        max_batch_size=SIZES["max_num_seqs"],
        num_blocks=SIZES["cache_blocks"],
        block_size=SIZES["block_size"],
        settings=STEPS,
    )
    engine = infinilm.AsyncLLMEngine(config)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    async def serve(number: int) -> None:
        job = jobs[number]
        request = engine.add_request(job.prompt, sampling_params=infinilm.SamplingParams(**job.settings))
        tokens: list[list[int]] = [[] for _ in range(job.settings["n"])]
        texts, ends = [""] * len(tokens), 0
        async with aclosing(engine.stream_request(request, timeout=300)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                tokens[output.index] += [] if output.token_id is None else [output.token_id]
                texts[output.index] += output.token_text
                ends += output.finish_reason not in (None, infinilm.FinishReason.CANCELED)
                if job.cancel_at is not None and sum(map(len, tokens)) >= job.cancel_at:
                    if number % 3 == 0:
                        break
                    # In the two other ways the loop goes on to the output that tells of the end.
                    _ = request.abort() if number % 3 == 1 else engine.abort(request.request_id)
        assert request.is_finished(), request
        assert texts[0] == request.generated_text[: len(texts[0])], request
        results[number] = Result(tokens, texts, ends == len(tokens))

    def run(numbers: Iterable[int]) -> None:
        try:
            asyncio.run(at_a_time(list(numbers), serve, AT_A_TIME // loops))
        except BaseException as error:
            failures.append(error)

    engine.start()
    threads = [threading.Thread(target=run, args=(range(i, len(jobs), loops),)) for i in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    asyncio.run(until_idle(engine.metrics))
    engine.stop()
    return [results[number] for number in range(len(jobs))], engine.metrics()


async def at_a_time(items: Sequence[Any], serve: Callable[[Any], Any], limit: int = AT_A_TIME) -> list[Any]:
    """Serve all items, so many at a time; their results in order."""
    places = asyncio.Semaphore(limit)

    async def one(item: Any) -> Any:
        async with places:
            return await serve(item)

    return await asyncio.gather(*map(one, items))


async def until_idle(metrics: Callable[[], Metrics], seconds: float = 30) -> None:
    """Wait until the engine has dropped what was cancelled last."""
    end = time.monotonic() + seconds
    while metrics().free_blocks < metrics().blocks and time.monotonic() < end:
        await asyncio.sleep(0.01)


def check(results: Sequence[Result], wanted: Sequence[Result], jobs: Sequence[Job], metrics: Metrics) -> dict[str, Any]:
    """Compare results with LLM.generate's.

    Returns:
        What happened, counted. Raises AssertionError if a token, a text, a request or a block is not what it must be.
    """
    assert len(results) == len(jobs)
    for number, (result, whole, job) in enumerate(zip(results, wanted, jobs, strict=True)):
        if result.is_whole:
            assert result == whole, f"request {number}, {job}: {result} is not {whole}"
            continue
        assert job.cancel_at is not None, f"request {number} ended though nobody cancelled it: {result}"
        for got, all in zip((*result.tokens, *result.texts), (*whole.tokens, *whole.texts), strict=False):
            assert got == all[: len(got)], f"request {number}, {job}: {result} does not begin {whole}"
    assert metrics.free_blocks == metrics.blocks and metrics.running == metrics.waiting == 0, metrics
    return {
        "requests": len(jobs),
        "cancelled": sum(not result.is_whole for result in results),
        "preemptions": metrics.preemptions,
        "reused_tokens": metrics.reused_tokens,
        "generated_tokens": metrics.generated_tokens,
    }


DOORS = {"async_llm": through_async_llm, "infinilm": through_infinilm}


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the same requests in two processes; fails where they differ.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", choices=[*DOORS], help=argparse.SUPPRESS)  # of a process that this one started
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jobs = random_jobs(arguments.requests, arguments.seed)
    if arguments.door is not None:
        start = time.perf_counter()
        results, metrics = DOORS[arguments.door](arguments.folder, jobs)
        report = {"seconds": round(time.perf_counter() - start, 1), "memory_mb": round(resident_bytes() / 1e6, 1)}
        print(json.dumps([results, vars(metrics), report]))
        return
    with TemporaryDirectory() as folder:
        save_model(Path(folder))
        command = [sys.executable, "-m", "support.async_soak", "--folder", folder]
        command += ["--requests", str(arguments.requests), "--seed", str(arguments.seed), "--door"]
        started = {door: subprocess.Popen([*command, door], stdout=subprocess.PIPE, text=True) for door in DOORS}
        wanted = expected(Path(folder), jobs)
        told = {door: process.communicate()[0] for door, process in started.items()}
        for door, process in started.items():
            if process.returncode:
                sys.exit(f"{door}: exit status {process.returncode}")
            results, metrics, report = json.loads(told[door])
            report |= check([Result(*result) for result in results], wanted, jobs, Metrics(**metrics))
            print(door, *(f"{name} {value}" for name, value in report.items()), sep=", ")


if __name__ == "__main__":
    main()
