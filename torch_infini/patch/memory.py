"""Memory that weights are read from fast: their own, from a cache line on, in large pages where the system gives them.

A decode step reads every weight once. Weights that are mapped from a checkpoint's file begin anywhere in a cache line
and lie in pages of 4 KiB; both cost time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

LINE = 64  # bytes
LARGE = 1 << 20  # bytes from which large pages are asked for


def moved(x: Tensor) -> Tensor:
    """A contiguous copy in memory of its own."""
    size = x.numel() * x.element_size()
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return x.clone(memory_format=torch.contiguous_format)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=x.dtype).view(x.shape).copy_(x)


def align(modules: Iterable[nn.Module]) -> None:
    """Give weights of linear layers that do not begin at a cache line memory of their own; the parameters stay.

    Parts of a larger memory are left: whoever made them looks for them there.
    """
    for module in modules:
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is None or not weight.is_cpu or weight.data_ptr() % LINE == 0 or weight.is_shared():
            continue
        if weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size():
            weight.data = moved(weight.data)
