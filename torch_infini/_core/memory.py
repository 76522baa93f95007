"""CPU memory for weights and caches: aligned to cache lines, in large pages where the system has them.

Decode steps read this memory. With pages of 4 KiB address translation costs time, and allocating them costs more than
large ones: reading 2.2 GB into small pages took 1.0 s, into large ones 0.3 s.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from .devices import INFINI, takes_memory_of, wrap

LINE = 64  # bytes of a cache line
LARGE = 1 << 20  # bytes from which large pages are asked for
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def trim() -> None:
    """Give memory that is free in the C library's heap back to the system.

    Intermediate results of some megabytes lie in the heap, between tensors that stay, and leave gaps there.
    """
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


def allocate(*shape: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Make a contiguous tensor; a large one on the CPU holds zeros, in pages that are allocated at first touch."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not takes_memory_of(device or "cpu") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    made = torch.frombuffer(_pages(size), dtype=dtype).view(shape)
    return wrap(made) if device is not None and torch.device(device).type == INFINI else made


def allocate_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make contiguous tensors of the CPU like others, all in one stretch of large pages; each has a storage of its own.

    Tensors that are allocated and filled one by one have small pages at their ends, for no large page fits in there.
    """
    starts = list(accumulate((-(-x.nbytes // LINE) * LINE for x in tensors), initial=0))
    if starts[-1] < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.empty(x.shape, dtype=x.dtype) for x in tensors]
    pages = _pages(starts[-1])
    return [
        torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
        if x.numel()
        else torch.empty(x.shape, dtype=x.dtype)
        for x, start in zip(tensors, starts, strict=False)
    ]


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
