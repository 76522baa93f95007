"""Moves weights to memory that they are read from fast.

A decode step reads every weight once. Weights that are mapped from a checkpoint's file begin anywhere in a cache line
and lie in pages of 4 KiB; both cost time.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from .._memory import new
from .shares import local

LINE = 64  # bytes


def moved(x: Tensor) -> Tensor:
    """A contiguous copy in memory of its own."""
    return new(*x.shape, dtype=x.dtype).copy_(x)


def align(modules: Iterable[nn.Module]) -> None:
    """Give weights of linear layers that do not begin at a cache line memory of their own; the parameters stay.

    Parts of a larger memory are left, for whoever made them looks for them there; but not this rank's part of a weight
    that ranks share, which transformers cut out of a mapped file.
    """
    for module in modules:
        parameter = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        weight = local(parameter)
        if weight is None or not weight.is_cpu or weight.data_ptr() % LINE == 0 or weight.is_shared():
            continue
        whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        if whole or weight is not parameter:
            weight.data = moved(weight.data)
