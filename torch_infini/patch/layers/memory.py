"""Moves weights to aligned memory.

A decode step reads every weight once. Weights mapped from a checkpoint file are not aligned to cache lines and use
pages of 4 KiB; both cost time.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..._core.devices import on_cpu, unwrap
from ..._core.memory import LINE, allocate, allocate_like
from ..shares import local


def align(modules: Iterable[nn.Module]) -> None:
    """Copy weights of linear layers that are not aligned to a cache line; the parameter objects stay.

    Views of larger tensors are left, because their owner may rely on the sharing; except this rank's shard of a weight,
    which transformers slices from a mapped file.
    """
    found: dict[int, Tensor] = {}
    for module in modules:
        parameter = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        weight = local(parameter)
        if weight is None or weight.data_ptr() % LINE == 0:
            continue
        if can_move(weight) and (is_whole(weight) or weight is not parameter):
            found[id(weight)] = weight
    move(found.values())


def use_large_pages(model: nn.Module) -> None:
    """Copy weights and buffers to large pages, in the order of their modules; the parameter objects stay."""
    move(x for x in (*model.parameters(), *model.buffers()) if can_move(x) and is_whole(x))


def move(tensors: Iterable[Tensor]) -> None:
    """Move tensors to new memory in large pages; the old memory is freed tensor by tensor, unless it is shared."""
    ours: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        (ours if tensor.device.type == "cpu" else others).append(tensor)
    for tensor, place in zip(ours, allocate_like(ours), strict=True):
        tensor.data = place.copy_(tensor.data)
    for tensor in others:  # on another device whose memory is the CPU's
        tensor.data = allocate(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


def can_move(tensor: Tensor) -> bool:
    """Return whether a tensor is in this process's memory alone, on the CPU."""
    return type(tensor) in (Tensor, nn.Parameter) and on_cpu(tensor) and not unwrap(tensor).is_shared()


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
