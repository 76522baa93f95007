"""What the server costs: the same requests by LLM.generate, by AsyncLLM's streams, and by streaming clients over HTTP.

    python benchmarks/serving.py --threads 1,2        # results/CPU/serving.csv

A Llama of random weights; prompts of 16 tokens, 64 tokens for each, all clients at once. The engine, the server and the
clients are a process each, so the clients' work is on the same CPU. The three take turns. tokens_per_s are output
tokens; ratio is the server's over LLM.generate's; ttft and itl are medians, and added_ms what the server has more of
than AsyncLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Cases, Row
from peers.engines import Failure

from torch_infini.commands.load.client import Target
from torch_infini.commands.load.prompts import Prompt, random_prompts
from torch_infini.commands.load.schedule import run_load
from torch_infini.testing.checkpoints import save_tokenizer
from torch_infini.testing.shapes import LLAMAS, saved_shape

FOLDER = harness.HERE.parent / "build" / "serving"
PROMPT, OUTPUT = 16, 64
CASES = [("tiny", 16), ("160M", 16), ("160M", 32), ("1.1B", 32)]
QUICK = [("tiny", 4)]
Figures = dict[str, float]


def checkpoint(shape: str) -> Path:
    """The folder of a model of that shape, with a tokenizer."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = saved_shape(shape, FOLDER)
    if not (path / "tokenizer.json").exists():
        save_tokenizer(path, int(LLAMAS[shape]["vocab_size"]))
    return path


# ---- the engine, in a process that takes a line of JSON for each measurement ----


def engine_process(folder: str, threads: int) -> None:
    import torch

    from torch_infini import LLM

    torch.set_num_threads(threads)
    llm = LLM(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        measure = by_generate if asked["mode"] == "generate" else by_streams
        print(json.dumps(measure(llm, asked["prompts"], asked["output"])), flush=True)


def by_generate(llm: Any, prompts: list[list[int]], output: int) -> Figures:
    from torch_infini import SamplingParams

    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0))
    seconds = time.perf_counter() - start
    return {"tokens_per_s": sum(len(one.outputs[0].token_ids) for one in outputs) / seconds}


def by_streams(llm: Any, prompts: list[list[int]], output: int) -> Figures:
    from torch_infini import AsyncLLM, SamplingParams

    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    first, gaps, tokens = [], [], 0

    async def stream(engine: Any, prompt: list[int]) -> None:
        nonlocal tokens
        last = start = time.perf_counter()
        async for output in engine.stream(prompt, params):
            now = time.perf_counter()
            first.append(now - start) if last == start else gaps.append(now - last)
            last = now
            if output.finished:
                tokens += len(output.outputs[0].token_ids)

    async def all_streams() -> float:
        engine = AsyncLLM(llm)
        start = time.perf_counter()
        await asyncio.gather(*(stream(engine, prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
        engine.close()
        return seconds

    seconds = asyncio.run(all_streams())
    return {"tokens_per_s": tokens / seconds, **medians(first, gaps)}


def medians(first: Sequence[float], gaps: Sequence[float]) -> Figures:
    # A client that is behind reads a whole answer at once: no gap was seen between its tokens.
    return {"ttft_ms": statistics.median(first) * 1e3, "itl_ms": statistics.median(gaps or [0.0]) * 1e3}


# ---- the measurement ----


@contextmanager
def started(command: list[str], threads: int, **more: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(harness.HERE.parent)}
    process = subprocess.Popen([sys.executable, *command], text=True, env=environment, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Until a server answers; Failure if it does not."""
    for _ in range(int(seconds * 10)):
        if process.poll() is not None:
            raise Failure(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            time.sleep(0.1)
    raise Failure(f"the server did not answer within {seconds:g} s")


def over_http(url: str, prompts: list[Prompt], model: str = "", more: Mapping[str, Any] | None = None) -> Figures:
    """What streaming clients measure, one for each prompt, all at once.

    Args:
        url: The server's.
        prompts: Of token ids.
        model: The model's name in requests.
        more: Fields of requests that this server takes.

    Raises:
        Failure: If a request fails, or has another number of tokens than was asked for.
    """
    fields = {"temperature": 0.0, "ignore_eos": True, **(more or {})}
    load = run_load(
        Target(f"{url}/v1", "completions", model, fields=fields),
        prompts,
        rate=float("inf"),
        concurrency=None,
        seed=0,
        timeout=600.0,
        objective=None,
    )
    _, summary = asyncio.run(load)
    failed = [result.failure for result in summary.results if result.failure is not None]
    if failed:
        raise Failure(f"a request failed: {failed[0].message}")
    done = summary.results
    for prompt, one in zip(prompts, done, strict=True):
        if one.output_tokens != prompt.output_tokens:
            raise Failure(f"a request has {one.output_tokens} tokens instead of {prompt.output_tokens}")
    first = [one.ttft for one in done if one.ttft is not None]
    tokens = sum(one.output_tokens for one in done)
    return {"tokens_per_s": tokens / summary.seconds, **medians(first, [gap for one in done for gap in one.gaps])}


def measure(shape: str, clients: int, threads: int, rounds: int) -> Row:
    folder = checkpoint(shape)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine_command = [__file__, "--engine", str(folder), "--threads", str(threads)]
    serve = ["-m", "torch_infini", "serve", "--model", str(folder), "--port", str(port), "--log-level", "error"]
    found: dict[str, list[Figures]] = {"generate": [], "streams": [], "served": []}
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        engine = stack.enter_context(started(engine_command, threads, **pipes))
        server = stack.enter_context(started([*serve, "--threads", str(threads)], threads))
        wait_for(url, server)
        assert engine.stdin is not None and engine.stdout is not None
        for round in range(rounds + 1):  # the first does not count
            prompts = random_prompts(clients, PROMPT, OUTPUT, round, int(LLAMAS[shape]["vocab_size"]))
            for mode in found:
                if mode == "served":
                    figures = over_http(url, prompts)
                else:
                    asked = {"mode": mode, "prompts": [prompt.content for prompt in prompts], "output": OUTPUT}
                    engine.stdin.write(json.dumps(asked) + "\n")
                    engine.stdin.flush()
                    figures = json.loads(engine.stdout.readline())
                found[mode] += [figures] if round else []
    median = {
        mode: {name: statistics.median(one[name] for one in each) for name in each[0]} for mode, each in found.items()
    }
    of_streams, served = median["streams"], median["served"]
    return {
        **{f"{mode}_tokens_per_s": median[mode]["tokens_per_s"] for mode in found},
        "ratio": statistics.median(
            one["tokens_per_s"] / other["tokens_per_s"]
            for one, other in zip(found["served"], found["generate"], strict=True)
        ),
        "ttft_ms": served["ttft_ms"],
        "itl_ms": served["itl_ms"],
        "ttft_added_ms": served["ttft_ms"] - of_streams["ttft_ms"],
        "itl_added_ms": served["itl_ms"] - of_streams["itl_ms"],
    }


def cases(options: argparse.Namespace) -> Cases:
    rounds = 1 if options.quick else options.rounds
    for threads in options.threads:
        for shape, clients in QUICK if options.quick else CASES:
            key = {"shape": shape, "clients": clients, "threads": threads}
            yield key, partial(measure, shape, clients, threads, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "serving.csv", threads=(1, 2), rounds=5, quick="a tiny model and one round")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.engine:
        engine_process(options.engine, options.threads[0])
        return
    try:
        harness.run(options, cases(options))
    except Failure as failure:
        sys.exit(f"serving: {failure}")


if __name__ == "__main__":
    main()
