"""Views between device `infini` and its backing device: the same memory as a tensor of the other device."""

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
        # CPU kernels have allocated it in their own memory.
        return gradient.to("infini") if vendor_device() else wrap(gradient)


def wrap(tensor: Tensor) -> Tensor:
    """Return a tensor on `infini` that shares the memory of one on the backing device.

    Neither tensor can be resized beyond its memory afterwards. Gradients flow through. A write to one is visible in the
    other, but does not change the other's version counter.

    Args:
        tensor: A tensor on backing(), of any shape and strides.

    Raises:
        RuntimeError: If the device is not enabled.
        TypeError: For a tensor of another device.
        NotImplementedError: For a sparse or quantized tensor, or, if a vendor's device backs infini, one in the CPU's
            memory.
    """
    backing()
    return _Wrap.apply(tensor)  # type: ignore[no-untyped-call]


def unwrap(tensor: Tensor) -> Tensor:
    """Return a tensor on the backing device that shares the memory of one on `infini`; the inverse of wrap().

    Args:
        tensor: A tensor on infini, of any shape and strides.

    Raises:
        RuntimeError: If the device is not enabled.
        TypeError: For a tensor of another device.
    """
    backing()
    return _Unwrap.apply(tensor)  # type: ignore[no-untyped-call]
