"""What the benchmarks share: times of rivals, the machine's limits they are held against, and CSV files.

All contestants take turns in every round, so a slow moment hits all alike; the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .._bandwidth import read_bandwidth
from .._cpu import cpu_name, folder_name
from .._library import cpu_capability

Call = Callable[[], Any]


def seconds(call: Call, repeats: int = 1) -> float:
    """Mean time of `repeats` calls in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def repeats_for(call: Call, least: float) -> int:
    """How many calls in a row take `least` seconds; the calls made to learn it also warm up."""
    call()
    repeats = 1
    while (each := seconds(call, repeats)) * repeats < least / 2:
        repeats = max(2 * repeats, min(10 * repeats, round(least / each)))
    return max(1, math.ceil(least / each))


def medians(contestants: Mapping[str, Call], rounds: int = 7, least: float = 0.02) -> dict[str, float]:
    """Median seconds of a call of each contestant, over rounds in which each runs for about `least` seconds or more."""
    repeats = {name: repeats_for(call, least) for name, call in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            times[name].append(seconds(call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True)
class Limits:
    """What this machine does at best with the current number of threads; the best of several tries.

    Attributes:
        read: Bytes a second of a dot product of two vectors far larger than the caches.
        copy: Bytes read and written a second by `y.copy_(x)` on such tensors.
        flops: Floating-point operations a second of torch's own large matrix product, by dtype.
    """

    read: float
    copy: float
    flops: dict[torch.dtype, float]

    @property
    def bandwidth(self) -> float:
        """The larger of read and copy: what a call that is bound by memory is held against."""
        return max(self.read, self.copy)

    def matmul(self, dtype: torch.dtype) -> tuple[torch.dtype, float]:
        """The dtype whose matrix product is the measure for arithmetic in `dtype`, and its operations a second."""
        measured = dtype if dtype in self.flops else torch.float32
        return measured, self.flops[measured]


def measure_limits(megabytes: int = 512, size: int = 2048, tries: int = 5) -> Limits:
    """Measure the limits; takes `megabytes` twice, and a few seconds."""
    x = torch.ones(megabytes * 2**20 // 4)
    y = torch.empty_like(x)
    flops = {}

    def best(call: Call) -> float:
        call()
        return min(seconds(call) for _ in range(tries))

    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, size, size).to(dtype)
        flops[dtype] = 2 * size**3 / best(lambda a=a, b=b: torch.nn.functional.linear(a, b))
    copy = best(lambda: y.copy_(x))
    return Limits(read=read_bandwidth(megabytes=megabytes), copy=8 * x.numel() / copy, flops=flops)


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else "" if value is None else value


def results_of(script: str) -> Path:
    """The folder of a benchmark's results on this kind of CPU: results/zen-4 beside the script."""
    return Path(script).resolve().parent / "results" / folder_name()


def write_csv(path: Path, rows: Sequence[Any], row_type: type) -> None:
    """The rows, dataclasses of row_type, under a header; four significant digits, nothing for None.

    The last columns are the CPU and the instruction set of the kernels.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpu": cpu_name(), "capability": cpu_capability()}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(f.name for f in fields(row_type)), *machine], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({**{name: rounded(value) for name, value in asdict(row).items()}, **machine})


def count(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """The same, several with commas between."""
    return [count(part) for part in text.split(",")]
