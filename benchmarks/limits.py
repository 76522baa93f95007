"""What the machine does at best with a number of threads: the limits that benchmarks hold kernels against.

Memory bandwidth by large reads and copies, arithmetic by torch's own large products or by vector_peak.c.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from harness import HERE, dtype_name
from torch import Tensor

from torch_infini._core.bandwidth import read_bandwidth
from torch_infini._core.memory import allocate
from torch_infini.testing.benchmark import Call, seconds

READ_BYTES = 1 << 28  # of what a benchmark reads in turns with its contestants


@cache
def vector() -> Tensor:
    return allocate(READ_BYTES // 4, dtype=torch.float32).fill_(1)


def read_once() -> None:
    """Read READ_BYTES: the sum of a vector in large pages. The first call makes it."""
    vector().sum()


@dataclass(frozen=True)
class Limits:
    """The best of several tries with the current number of threads.

    Attributes:
        read: Bytes a second of the sum of a vector far larger than the caches, in large pages.
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

    def __str__(self) -> str:
        products = ", ".join(f"matmul {dtype_name(d)} {v / 1e9:.0f} GFLOP/s" for d, v in self.flops.items())
        return f"read {self.read / 1e9:.1f}, copy {self.copy / 1e9:.1f} GB/s, {products}"

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
        flops[dtype] = 2 * size**3 / best(lambda a=a, b=b: torch.nn.functional.linear(a, b))  # type: ignore[misc]
    copy = best(lambda: y.copy_(x))
    return Limits(read=read_bandwidth(megabytes=megabytes), copy=8 * x.numel() / copy, flops=flops)


def measure_peaks(threads: int, seconds: float) -> dict[torch.dtype, float]:
    """Operations a second of vector_peak.c, by dtype; of int8, 0 where the machine has no VNNI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(HERE / "vector_peak.c"), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))

        def peak(name: str) -> float:
            function = library[name]
            function.restype = ctypes.c_double
            with ThreadPoolExecutor(threads) as pool:
                return sum(pool.map(function, [ctypes.c_double(seconds)] * threads))

        f32, bf16, int8 = peak("f32_peak"), peak("bf16_peak"), peak("int8_peak")
    return {torch.float32: f32, torch.float16: f32, torch.bfloat16: bf16 or f32, torch.int8: int8}
