"""Times of calls that are compared: all take turns in every round, so that a slow moment of the machine hits all alike.

The median over the rounds counts. For benchmarks, and for what measures the machine at hand (commands/tune.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

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


def medians(calls: Mapping[str, Call], rounds: int = 7, least: float = 0.02) -> dict[str, float]:
    """Median seconds of each call, over rounds in which each is repeated for about `least` seconds or more."""
    repeats = {name: repeats_for(call, least) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_medians(
    measurements: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, before: Call | None = None
) -> dict[tuple[str, str], float]:
    """Medians of what measurements that time themselves return.

    Args:
        measurements: By name; each returns seconds by phase.
        rounds: In addition to a first one, which warms up and does not count.
        before: Called at the start of every round, the first included.

    Returns:
        Median seconds by (name, phase).
    """
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        if before is not None:
            before()
        for name, measure in measurements.items():
            for phase, value in measure().items():
                if turn:
                    times.setdefault((name, phase), []).append(value)
    return {key: statistics.median(values) for key, values in times.items()}
