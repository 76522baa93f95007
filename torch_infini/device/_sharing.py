"""Infini tensors between processes: torch.multiprocessing sends the backing device's tensor and wraps it on arrival."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ._enable import after_enabling, enable
from ._state import backing, vendor_device


def rebuild(
    below: Literal["cpu", "cuda"],
    make: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    requires_grad: bool,
    kind: type,
) -> Tensor:
    """Make a received tensor on infini, which the receiving process enables if necessary."""
    enable(below)
    tensor: Tensor = torch.ops.infini_device.wrap(make(*arguments))
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Return ForkingPickler's form of a tensor; memory on the CPU is moved to where other processes can map it."""
    if tensor.device.type != "infini":
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries. If you just want to transfer the data, call detach() on the tensor before "
            "serializing (e.g., putting it on the queue)."
        )
    if vendor_device() is not None:
        raise NotImplementedError(
            f"infini: the memory of a {vendor_device()} device cannot be shared between processes: send tensor.cpu() "
            "and move it there"
        )
    below = torch.ops.infini_device.unwrap(tensor.detach()).share_memory_()
    torch.ops.infini_device.follow(tensor)
    make, arguments = reductions.reduce_tensor(below)
    return rebuild, (backing(), make, arguments, tensor.requires_grad, type(tensor))


def install() -> None:
    """Make torch.multiprocessing's queues and processes accept infini tensors."""
    for kind in (Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce)


after_enabling.append(install)
