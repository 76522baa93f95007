"""Elementwise sums and products of two tensors."""

from __future__ import annotations

from .._arguments import raw
from ..lib import _infinicore
from ..tensor import Tensor


def add(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return input + other, for tensors of equal shape and dtype; `torch.add(input, other)`.

    `out` may be one of them. To broadcast a dimension, give it stride 0 (as_strided()).
    """
    a, b = raw(input, "infinicore.add", "input"), raw(other, "infinicore.add", "other")
    if out is None:
        return Tensor(_infinicore.add(a, b))
    _infinicore.add_(raw(out, "infinicore.add", "out"), a, b)
    return out


def mul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return input * other, for tensors of equal shape and dtype; `torch.mul(input, other)`."""
    a, b = raw(input, "infinicore.mul", "input"), raw(other, "infinicore.mul", "other")
    if out is None:
        return Tensor(_infinicore.mul(a, b))
    _infinicore.mul_(raw(out, "infinicore.mul", "out"), a, b)
    return out
