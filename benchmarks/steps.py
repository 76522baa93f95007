"""Where the time of a patched model's step goes: products, attention, other ops, and the host between them.

    python benchmarks/steps.py --threads 1,2        # results/CPU/steps.csv

A Llama of random weights. A step's time is the median without the profiler; that of its ops is what torch.profiler
counts in other steps just like it; the host has the rest: Python, the dispatcher, and the profiler's own error.
weights_gb_per_s is what the products of a decode read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Cases, Row
from torch.profiler import ProfilerActivity, profile

import torch_infini
from torch_infini._core.bandwidth import read_bandwidth
from torch_infini.testing.shapes import LLAMAS, random_of_shape, weight_bytes

# (shape, weights, phase, length): what a decode begins with, what a prefill has.
CASES = [
    *(("1.1B", None, "decode", length) for length in (16, 2048)),
    *(("1.1B", None, "prefill", length) for length in (512, 2048)),
    *(("1.1B", weights, "decode", 16) for weights in ("int8", "int4")),
    *(("160M", weights, "decode", 16) for weights in (None, "int8", "int4")),
]
QUICK = [("tiny", None, "decode", 16), ("tiny", "int4", "prefill", 8)]
PRODUCTS = ("linear", "mm", "matmul")  # parts of the names of ops
ATTENTION = ("attention", "qkv_rope_cache")


def stepper(model: Any, phase: str, length: int) -> Callable[[], Any]:
    """A call of one step; a decode's begin where the last one ended."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    prefill: Callable[[], Any] = lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)
    if phase == "prefill":
        return prefill
    cache, token = prefill().past_key_values, ids[:, :1]
    return lambda: model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)


def milliseconds(step: Callable[[], Any], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def profiled_ms(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Milliseconds a step that torch.profiler counts, by the name of the op."""
    for _ in range(2):  # the first one's first events are slow
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
    return {event.key: event.self_cpu_time_total / 1e3 / steps for event in profiler.key_averages()}


def measure(model: Any, phase: str, length: int, steps: int) -> Row:
    step = stepper(model, phase, length)
    milliseconds(step, 2)  # warms up
    whole = statistics.median(milliseconds(step, steps))
    ops = {"products": 0.0, "attention": 0.0, "other": 0.0}
    for name, ms in profiled_ms(step, steps).items():
        products, attention = (any(part in name for part in parts) for parts in (PRODUCTS, ATTENTION))
        ops["attention" if attention else "products" if products else "other"] += ms
    return {
        "step_ms": whole,
        "products_ms": ops["products"],
        "attention_ms": ops["attention"],
        "other_ops_ms": ops["other"],
        "host_ms": whole - sum(ops.values()),
        "weights_gb_per_s": weight_bytes(model) / ops["products"] / 1e6 if phase == "decode" else None,
        "read_gb_per_s": read_bandwidth(0.2) / 1e9,
    }


def cases(options: argparse.Namespace) -> Cases:
    chosen = QUICK if options.quick else [case for case in CASES if options.shape in (None, case[0])]
    for shape, weights in dict.fromkeys(case[:2] for case in chosen):
        model = random_of_shape(shape)
        torch_infini.patch_model(model, weights=weights)
        for threads in options.threads:
            for *_, phase, length in (case for case in chosen if case[:2] == (shape, weights)):
                steps = options.steps if phase == "decode" else max(2, options.steps // 8)
                key = {"shape": shape, "weights": weights or "bfloat16", "phase": phase, "length": length}
                yield {**key, "threads": threads}, partial(measure, model, phase, length, steps)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "steps.csv", threads=[1], quick="a tiny model")
    parser.add_argument("--shape", choices=[name for name in LLAMAS if name != "tiny"], help="only this one")
    help_text = "of a measurement; of prompts an eighth (default: 32)"
    parser.add_argument("--steps", type=harness.count, default=32, help=help_text)
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
