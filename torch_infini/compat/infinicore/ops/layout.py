"""Views, and a copy with other strides."""

from __future__ import annotations

from .._arguments import raw
from ..lib import _infinicore
from ..tensor import Tensor


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a view of `length` elements of a dimension, from `start`; RuntimeError if it exceeds the dimension."""
    return Tensor(raw(input, "infinicore.narrow", "input")).narrow(dim, start, length)


def squeeze(input: Tensor, dim: int) -> Tensor:
    """Return a view without a dimension, which must have size 1 (else RuntimeError)."""
    return Tensor(raw(input, "infinicore.squeeze", "input")).squeeze(dim)


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """Return a view with a new dimension of size 1 and stride 0."""
    return Tensor(raw(input, "infinicore.unsqueeze", "input")).unsqueeze(dim)


def rearrange(input: Tensor, other: object = None, *, out: Tensor | None = None) -> Tensor:
    """Return a contiguous copy, or copy to `out`, which has the same shape and dtype and any strides.

    `input.clone(memory_format=torch.contiguous_format)`

    Args:
        other: Ignored; existing callers pass something here.
    """
    source = raw(input, "infinicore.rearrange", "input")
    if out is None:
        return Tensor(_infinicore.rearrange(source))
    _infinicore.rearrange_(raw(out, "infinicore.rearrange", "out"), source)
    return out
