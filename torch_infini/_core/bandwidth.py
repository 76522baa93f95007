"""Measures the machine's memory bandwidth: the limit of decode, norms and copies."""

from __future__ import annotations

import time

import torch


def read_bandwidth(seconds: float = 0.5, megabytes: int = 512) -> float:
    """Bytes per second that torch's threads read from memory: the best of some dot products of two large vectors.

    A dot product reads two streams and writes nothing; the vectors are far larger than any cache.
    """
    n = megabytes * 1024 * 1024 // 8
    a, b = torch.ones(n), torch.ones(n)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        torch.dot(a, b)
        times.append(time.perf_counter() - start)
    return 8 * n / min(times)
