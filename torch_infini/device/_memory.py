"""Views between device `infini` and its backing device: the same memory, seen as a tensor of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._state import backing, vendor_device


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.ops.infini_device.wrap(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return unwrap(gradient)


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.ops.infini_device.unwrap(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to("infini") if vendor_device() else wrap(gradient)  # CPU kernels made it in their own memory


def wrap(tensor: Tensor) -> Tensor:
    """Return a tensor on `infini` that shares the memory of one on the backing device.

    Neither can be resized afterwards beyond its memory. Gradients pass; a write to one is seen by the other, but not
    counted by its version.

    Args:
        tensor: On backing(), of any shape and strides.

    Raises:
        RuntimeError: If the device is not enabled.
        TypeError: For a tensor of another device.
        NotImplementedError: For a sparse or quantized tensor, or one in the CPU's memory where a vendor's device backs
            infini.
    """
    backing()
    return _Wrap.apply(tensor)  # type: ignore[no-untyped-call]


def unwrap(tensor: Tensor) -> Tensor:
    """Return a tensor on the backing device that shares the memory of one on `infini`; the reverse of wrap().

    Args:
        tensor: On infini, of any shape and strides.

    Raises:
        RuntimeError: If the device is not enabled.
        TypeError: For a tensor of another device.
    """
    backing()
    return _Unwrap.apply(tensor)  # type: ignore[no-untyped-call]
