"""Engines on small models, random requests, and the soak that ends with every block returned.

PYTHONPATH=tests python -m support.engines --requests 10000
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch_infini.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import SMALL, random_model, save_tokenizer


def small_engine(folder: Path, model: str = "llama", tokenizer: bool = True, **settings: Any) -> Engine:
    """An engine on a model of testing.checkpoints, which is saved to `folder` first."""
    from torch_infini.engine.loading import load_tokenizer

    theirs = random_model(model)
    theirs.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, theirs.config.vocab_size)
    return Engine(Llama.from_pretrained(folder), load_tokenizer(folder), EngineConfig(**settings))


def finish(engine: Engine, at_most: int = 100_000) -> dict[str, RequestOutput]:
    """Step until there is nothing to do: the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(at_most):
        if engine.is_idle:
            return outputs
        for output in engine.step():
            assert output.request_id not in outputs, "told of a request after its end"
            if output.finished:
                outputs[output.request_id] = output
    raise AssertionError(f"the engine was not idle after {at_most} steps")


def random_params(chance: random.Random, most: int) -> SamplingParams:
    """Settings of all kinds, at most so many tokens."""
    return SamplingParams(
        n=chance.choice([1, 1, 1, 2, 3]),
        temperature=chance.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=chance.choice([0, 1, 20]),
        top_p=chance.choice([1.0, 0.9]),
        min_p=chance.choice([0.0, 0.0, 0.05]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
        presence_penalty=chance.choice([0.0, 0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.3]),
        seed=chance.choice([None, chance.randrange(1000)]),
        logprobs=chance.choice([None, None, 0, 3]),
        stop_token_ids=chance.sample(range(SMALL["vocab_size"]), chance.choice([0, 0, 2])),
        max_tokens=chance.randint(1, most),
    )


def resident_bytes() -> int:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell")


def soak(requests: int, seed: int = 0) -> dict[str, Any]:
    """Serve many short requests that arrive at random, some of them cancelled, on a cache that is too small for them.

    Returns:
        What happened, counted. Raises AssertionError if a block or a request was lost.
    """
    chance = random.Random(seed)
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        engine = small_engine(
            Path(folder), max_num_seqs=12, cache_blocks=40, block_size=8, chunk_size=16, max_num_batched_tokens=48
        )
    prefixes = [[chance.randrange(SMALL["vocab_size"]) for _ in range(40)] for _ in range(4)]
    waiting: set[str] = set()
    finishes: Counter[str] = Counter()
    begun = told = cancelled = 0
    memory: list[int] = []
    while begun < requests or not engine.is_idle:
        while begun < requests and len(waiting) < 40 and chance.random() < 0.7:
            prompt = chance.choice(prefixes)[: chance.randint(1, 40)] if chance.random() < 0.5 else []
            prompt = prompt + [chance.randrange(SMALL["vocab_size"]) for _ in range(chance.randint(1, 40))]
            waiting.add(engine.add(prompt, random_params(chance, 24)))
            begun += 1
        if waiting and chance.random() < 0.05:
            cancelled += engine.abort(chance.choice(sorted(waiting)))
        for output in engine.step():
            if output.finished:
                waiting.remove(output.request_id)
                told += 1
                finishes.update(str(completion.finish_reason) for completion in output.outputs)
        if told // (requests // 10 or 1) > len(memory):
            gc.collect()
            memory.append(resident_bytes())
    metrics = engine.metrics()
    assert not waiting and told == requests, (waiting, told)
    assert metrics.free_blocks == metrics.blocks, metrics
    assert metrics.running == metrics.waiting == 0, metrics
    return {
        "requests": requests,
        "cancelled": cancelled,
        "finishes": dict(finishes),
        "preemptions": metrics.preemptions,
        "steps": metrics.steps,
        "generated_tokens": metrics.generated_tokens,
        "reused_tokens": metrics.reused_tokens,
        "blocks": f"{metrics.free_blocks} of {metrics.blocks} free",
        "memory_mb": [round(m / 1e6, 1) for m in memory],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve many random requests; fails if anything is lost or grows.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = soak(arguments.requests, arguments.seed)
    for name, value in report.items():
        print(f"{name:18} {value}")
    first, last = report["memory_mb"][len(report["memory_mb"]) // 3], report["memory_mb"][-1]
    if last > first + 8:
        sys.exit(f"memory grew from {first} to {last} MB in the last two thirds")


if __name__ == "__main__":
    main()
