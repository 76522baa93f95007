"""Memory of the CPU that is read fast: from a cache line on, in large pages where the system gives them.

What a decode step reads lies there: weights and caches. In pages of 4 KiB looking up addresses costs time too, and
making them costs more than large ones: 2.2 GB took 1.0 s to read into them, and 0.3 into large ones.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 1 << 20  # bytes from which large pages are asked for


def new(*shape: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """A contiguous tensor; on the CPU a large one begins as zeros, whose memory is taken when it is first touched."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device or "cpu").type != "cpu" or size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
