"""Times of calls to compare: they take turns in every round, so that a slow moment of the machine affects all.

The median over the rounds is reported. For benchmarks, and for commands/tune.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]


def seconds(call: Call, repeats: int = 1) -> float:
    """Return the mean time of `repeats` calls in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def repeats_for(call: Call, least: float) -> int:
    """Return how many calls in a row take `least` seconds; the calls made to find out also warm up."""
    call()
    repeats = 1
    while (each := seconds(call, repeats)) * repeats < least / 2:
        repeats = max(2 * repeats, min(10 * repeats, round(least / each)))
    return max(1, math.ceil(least / each))


def medians(calls: Mapping[str, Call], rounds: int = 7, least: float = 0.02) -> dict[str, float]:
    """Return the median seconds of each call, over rounds that repeat it for about `least` seconds or more."""
    repeats = {name: repeats_for(call, least) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_medians(
    measurements: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, before: Call | None = None
) -> dict[tuple[str, str], float]:
    """Return the medians of measurements that time themselves.

    Args:
        measurements: By name; each returns seconds by phase.
        rounds: The number of rounds, besides a first one that warms up and is not counted.
        before: Called at the start of every round, including the first.

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
