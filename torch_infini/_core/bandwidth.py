"""Measures the machine's memory bandwidth: the limit of decode, norms and copies."""

from __future__ import annotations

import time

import torch

from .memory import allocate


def read_bandwidth(seconds: float = 0.5, megabytes: int = 512) -> float:
    """Bytes per second that torch's threads read from memory: the best of some sums of a large vector.

    A sum reads one stream and writes nothing; the vector is far larger than any cache, and in large pages, as weights
    are: from pages of 4 KiB a Zen 4 core reads 25 GB/s, from those 35.
    """
    x = allocate(megabytes * 1024 * 1024 // 4, dtype=torch.float32).fill_(1)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)
