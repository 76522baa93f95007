"""An op's instruction sets, scopes with another instruction set or thread count, and the device of CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._core.library import cpu_capabilities, cpu_capability, emulates_cuda, set_cpu_capability

INT8_PRODUCTS = (
    "linear_int8",
    "linear_int4",
    "linear_group8",
    "linear_table4",
    "scaled_mm_int8",
    "Int8Gemm",
)  # ops with kernels in *_dot_cpu.cpp files


def cuda_device() -> str | None:
    """Return the device that tensors need for the CUDA kernels: cuda; cpu, if they are emulated; None without any."""
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("infini::rms_norm", "CUDA")
    return "cpu" if emulates_cuda() else "cuda" if torch.cuda.is_available() and has_kernels else None


def kernel_levels(op: str = "") -> list[str]:
    """Return the machine's instruction sets for which an op has its own kernels, lowest first.

    The VNNI-only levels are included only for INT8_PRODUCTS: other ops use the kernels of avx2 and avx512 there.
    """
    return [name for name in cpu_capabilities() if not name.endswith("_vnni") or op in INT8_PRODUCTS]


@contextmanager
def cpu_capability_set_to(name: str) -> Iterator[None]:
    """Run the body with the CPU kernels of one instruction set; ValueError if the machine lacks it."""
    before = cpu_capability()
    set_cpu_capability(name)
    try:
        yield
    finally:
        set_cpu_capability(before)


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """Run the body with torch's (and so our) number of threads set to `count`."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
