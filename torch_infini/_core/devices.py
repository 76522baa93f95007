"""The device type "infini" as seen by packages that must not import torch_infini.device: whose memory its tensors are.

A tensor on infini is a view of memory of the backing device, so what holds for the backing (kernels, instruction sets,
host pointers, shared memory) holds for it. torch_infini.device.enable() sets the backing; nothing here registers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINI = "infini"

_backing: str | None = None
_takes_any_memory = True


def set_backing(device_type: str, takes_any_memory: bool) -> None:
    """Say what backs the device infini, once, when it is registered.

    Args:
        device_type: "cpu" or "cuda".
        takes_any_memory: Whether wrap() takes memory of any allocator of that device: not with a vendor's device.
    """
    global _backing, _takes_any_memory
    _backing, _takes_any_memory = device_type, takes_any_memory


def takes_memory_of(device: torch.device | str) -> bool:
    """Return whether tensors on a device may lie in memory that this process has allocated for them by itself."""
    found = torch.device(device).type
    return found == "cpu" or (found == INFINI and _backing == "cpu" and _takes_any_memory)


def backing_type(device: torch.device | str) -> str:
    """Return the type of the device whose memory a device's tensors are in: that of infini's backing, or its own.

    Args:
        device: A device or its name, with or without an index.

    Raises:
        RuntimeError: For a name that torch does not know, infini among them before it is enabled.
    """
    found = torch.device(device).type
    return _backing if found == INFINI and _backing is not None else found


def backing_device(device: torch.device | str | int) -> torch.device:
    """Return the device whose memory a device's tensors are in, with the same index."""
    device = torch.device(device)
    found = backing_type(device)
    if found == device.type:
        return device
    return torch.device(found) if found == "cpu" or device.index is None else torch.device(found, device.index)


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is in the CPU's memory: on the CPU, or on infini backed by it."""
    return tensor.is_cpu or (_backing == "cpu" and tensor.device.type == INFINI)


def on_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is in a GPU's memory: on CUDA, or on infini backed by it."""
    return tensor.is_cuda or (_backing == "cuda" and tensor.device.type == INFINI)


def unwrap(tensor: Tensor) -> Tensor:
    """Return the view on the backing device of a tensor on infini; any other tensor itself."""
    if tensor.device.type != INFINI:
        return tensor
    found: Tensor = torch.ops.infini_device.unwrap(tensor)
    return found


def wrap(tensor: Tensor) -> Tensor:
    """Return the view on infini of a tensor on its backing device."""
    found: Tensor = torch.ops.infini_device.wrap(tensor)
    return found
