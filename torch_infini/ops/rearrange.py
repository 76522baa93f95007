"""rearrange: a copy of a tensor between any two layouts.

The kernel is csrc/infiniop/rearrange, shared with the C ABI's Rearrange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def rearrange(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy a tensor into another layout of the same shape.

    y = x, bit for bit. Transpositions are done tile by tile, so that every cache line is read and written once.

    Args:
        x: Any shape and strides; float16 to float64, bfloat16, bool or an integer of 8 to 64 bits.
        out: Written and returned instead of a new tensor; of x's shape and dtype and any strides.

    Returns:
        The shape and dtype of x, contiguous: always a copy.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = x.clone(memory_format=torch.contiguous_format)

    Source: Rearrange of the Infini C interface; torch.Tensor.copy_.
    """
    return torch.ops.infini.rearrange.default(x) if out is None else torch.ops.infini.rearrange.out(x, out=out)


SPEC = OpSpec(rearrange, fake=like_first)
