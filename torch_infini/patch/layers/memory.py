"""Moves weights to aligned memory.

A decode step reads every weight once. Weights mapped from a checkpoint file are not aligned to cache lines and use
pages of 4 KiB; both cost time.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..._core.devices import on_cpu, unwrap
from ..._core.memory import allocate
from ..shares import local

LINE = 64  # bytes


def moved(x: Tensor) -> Tensor:
    return allocate(*x.shape, dtype=x.dtype, device=x.device).copy_(x)


def align(modules: Iterable[nn.Module]) -> None:
    """Copy weights of linear layers that are not aligned to a cache line; the parameter objects stay.

    Views of larger tensors are left, because their owner may rely on the sharing; except this rank's shard of a weight,
    which transformers slices from a mapped file.
    """
    for module in modules:
        parameter = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        weight = local(parameter)
        if weight is None or not on_cpu(weight) or weight.data_ptr() % LINE == 0 or unwrap(weight).is_shared():
            continue
        whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        if whole or weight is not parameter:
            weight.data = moved(weight.data)
