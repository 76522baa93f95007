"""What infinilm.llm adds to torch_infini's own LLM and AsyncLLM: decode and serving of the same requests by both.

    python benchmarks/infinilm.py --threads 1,2        # results/CPU/infinilm.csv

Random weights in bfloat16, greedy, no tokenizer, no prefix reused. Both front ends have one model, caches of the same
size and their own default block size, and take turns in every round; medians count. ratio is the time through
infinilm.llm over that of torch_infini: 1.03 is the most that it may be. A decode is a prompt of 16 tokens and the steps
behind it, a serve 32 requests at once, of which "async" ones are streamed, each by a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import harness
import torch
from harness import MODELS, Cases, Row
from peers import protocol

import torch_infini
from torch_infini.compat.infinilm import llm as infinilm
from torch_infini.models import Llama
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.testing.shapes import LLAMAS, saved_shape

SEQUENCES = 32
TOKENS = SEQUENCES * 1024  # of each cache
Requests = tuple[list[list[int]], list[int]]  # prompts, and the number of tokens of each output


def greedy(count: int) -> Any:
    return torch_infini.SamplingParams.greedy(max_tokens=count, ignore_eos=True)


def greedy_of_infinilm(count: int) -> Any:
    return infinilm.SamplingParams(top_k=1, max_tokens=count, ignore_eos=True)


def infini(model: Llama, requests: Requests, stack: ExitStack) -> Callable[[], int]:
    """A call that serves the requests through torch_infini.LLM, and returns their tokens."""
    llm = torch_infini.LLM(model, max_num_seqs=SEQUENCES, cache_blocks=TOKENS // 32, enable_prefix_caching=False)
    prompts, counts = requests
    return lambda: sum(len(output.token_ids) for output in llm.generate(prompts, [greedy(count) for count in counts]))


def through_infinilm(model: Llama, requests: Requests, stack: ExitStack) -> Callable[[], int]:
    llm = infinilm.LLM(model, max_batch_size=SEQUENCES, num_blocks=TOKENS // 16, enable_prefix_caching=False)
    prompts, counts = requests

    def serve() -> int:
        params = [greedy_of_infinilm(count) for count in counts]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params))

    return serve


def infini_async(model: Llama, requests: Requests, stack: ExitStack) -> Callable[[], int]:
    llm = torch_infini.AsyncLLM(model, max_num_seqs=SEQUENCES, cache_blocks=TOKENS // 32, enable_prefix_caching=False)
    stack.callback(llm.close)

    async def read(prompt: list[int], count: int) -> int:
        return sum([len(output.outputs[0].new_token_ids) async for output in llm.stream(prompt, greedy(count))])

    return lambda: together(requests, read)


def through_infinilm_async(model: Llama, requests: Requests, stack: ExitStack) -> Callable[[], int]:
    config = {"max_batch_size": SEQUENCES, "num_blocks": TOKENS // 16, "enable_prefix_caching": False}
    engine = infinilm.AsyncLLMEngine(model, **config)
    engine.start()
    stack.callback(engine.stop)

    async def read(prompt: list[int], count: int) -> int:
        request = engine.add_request(None, prompt, greedy_of_infinilm(count))
        return sum([output.token_id is not None async for output in engine.stream_request(request)])

    return lambda: together(requests, read)


def together(requests: Requests, read: Callable[[list[int], int], Any]) -> int:
    """Read all requests at a time, a task each; the tokens of all."""

    async def run() -> int:
        return sum(await asyncio.gather(*(read(*pair) for pair in zip(*requests, strict=True))))

    return asyncio.run(run())


DOORS = {"generate": (infini, through_infinilm), "async": (infini_async, through_infinilm_async)}


def measure(model: Llama, requests: Requests, kind: str, rounds: int) -> Row:
    tokens = sum(requests[1])
    with ExitStack() as stack:
        calls = {name: make(model, requests, stack) for name, make in zip(("infini", "infinilm"), DOORS[kind])}

        def taken(call: Callable[[], int]) -> Mapping[str, float]:
            start = time.perf_counter()
            done = call()
            seconds = time.perf_counter() - start
            if done != tokens:
                raise RuntimeError(f"{tokens} tokens must come, got {done}")
            return {"all": seconds}

        times = interleaved_medians({name: partial(taken, call) for name, call in calls.items()}, rounds)
    ours, theirs = times["infinilm", "all"], times["infini", "all"]
    return {
        "infinilm_tokens_per_s": tokens / ours,
        "infini_tokens_per_s": tokens / theirs,
        "above_us_per_token": (ours - theirs) / tokens * 1e6,
        "ratio": ours / theirs,
        "rounds": rounds,
    }


def cases(options: Any) -> Cases:
    shape = "tiny" if options.quick else options.shape
    folder = saved_shape(shape, MODELS / "models")
    vocabulary = protocol.vocabulary(str(folder))
    steps = 8 if options.quick else options.steps
    decode = protocol.prompt(1, 16, vocabulary), [steps]
    prompts, counts = protocol.requests(SEQUENCES, vocabulary)
    if options.quick:
        prompts, counts = [prompt[:16] for prompt in prompts], [min(count, steps) for count in counts]
    cells: dict[str, tuple[Requests, str]] = {
        "decode-16": (decode, "generate"),
        "decode-16 async": (decode, "async"),
        "serve-32": ((prompts, counts), "generate"),
        "serve-32 async": ((prompts, counts), "async"),
    }
    model = Llama.from_pretrained(folder, dtype=torch.bfloat16, progress=False)
    for threads in options.threads:
        for cell, (requests, kind) in cells.items():
            key = {"shape": shape, "cell": cell, "threads": threads}
            yield key, partial(measure, model, requests, kind, options.rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "infinilm.csv", threads=[1], rounds=7, quick="a tiny model and 8 tokens each")
    parser.add_argument("--shape", choices=LLAMAS, default="1.1B", help="of the model (default: 1.1B)")
    parser.add_argument("--steps", type=harness.count, default=64, help="tokens of a decode (default: 64)")
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
