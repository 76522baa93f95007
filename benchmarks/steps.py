"""Where the time of a patched model's step goes: products, attention, other ops, and the host between them.

    python benchmarks/steps.py --threads 1,2

A Llama of random weights. A step's time is the median without the profiler; that of its ops is what torch.profiler
counts in other steps just like it; the host has the rest: Python, the dispatcher, and the profiler's own error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import torch_infini
from torch_infini._bandwidth import read_bandwidth
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import count, counts, results_of, write_csv
from torch_infini.testing.llama import SHAPES, random_llama, weight_bytes

RESULTS = results_of(__file__)
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


@dataclass
class Row:
    """One line of the CSV."""

    shape: str
    weights: str
    phase: str
    length: int
    threads: int
    step_ms: float
    products_ms: float
    attention_ms: float
    other_ops_ms: float
    host_ms: float
    weights_gb_per_s: float | None  # that the products of a decode read
    read_gb_per_s: float


def stepper(model: Any, phase: str, length: int) -> Callable[[], Any]:
    """A call of one step; a decode's begin where the last one ended."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    prefill = lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)
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


def measure(model: Any, phase: str, length: int, steps: int, **case: Any) -> Row:
    step = stepper(model, phase, length)
    milliseconds(step, 2)  # warms up
    whole = statistics.median(milliseconds(step, steps))
    for _ in range(2):  # the first one's first events are slow
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            milliseconds(step, steps)
    ops = {"products": 0.0, "attention": 0.0, "other": 0.0}
    for event in profiler.key_averages():
        products, attention = (any(part in event.key for part in parts) for parts in (PRODUCTS, ATTENTION))
        name = "attention" if attention else "products" if products else "other"
        ops[name] += event.self_cpu_time_total / 1e3 / steps
    return Row(
        phase=phase,
        length=length,
        step_ms=whole,
        products_ms=ops["products"],
        attention_ms=ops["attention"],
        other_ops_ms=ops["other"],
        host_ms=whole - sum(ops.values()),
        weights_gb_per_s=weight_bytes(model) / ops["products"] / 1e6 if phase == "decode" else None,
        read_gb_per_s=read_bandwidth(0.2) / 1e9,
        **case,
    )


def line(row: Row) -> str:
    share = lambda value: f"{value:8.2f} ms {value / row.step_ms:4.0%}"
    text = f"{row.shape:5} {row.weights:8} {row.phase:7} {row.length:5} {row.threads} thread(s) {row.step_ms:9.2f} ms:"
    text += f" products {share(row.products_ms)}, attention {share(row.attention_ms)}"
    text += f", other ops {share(row.other_ops_ms)}, host {share(row.host_ms)}"
    read = row.weights_gb_per_s
    return text + (f"; weights at {read:.1f} of {row.read_gb_per_s:.1f} GB/s" if read is not None else "")


def run(cases: Sequence[tuple[str, str | None, str, int]], threads: Sequence[int], steps: int) -> list[Row]:
    rows = []
    with torch.no_grad():
        for shape, weights in dict.fromkeys(case[:2] for case in cases):
            model = random_llama(shape)
            torch_infini.patch_model(model, weights=weights)
            for count in threads:
                with threads_set_to(count):
                    for *_, phase, length in (case for case in cases if case[:2] == (shape, weights)):
                        few = steps if phase == "decode" else max(2, steps // 8)
                        case = {"shape": shape, "weights": weights or "bfloat16", "threads": count}
                        rows.append(measure(model, phase, length, few, **case))
                        print(line(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=counts, default=[1], help="default: 1")
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], help="only this one")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--steps", type=count, default=32, help="of a measurement; of prompts an eighth (default: 32)")
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.csv", help="CSV file (default: results/steps.csv)")
    options = parser.parse_args(argv)
    cases = QUICK if options.quick else [case for case in CASES if options.shape in (None, case[0])]
    rows = run(cases, options.threads, options.steps)
    write_csv(options.out, rows, Row)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
