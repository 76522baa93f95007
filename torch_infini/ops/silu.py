"""silu: the sigmoid linear unit, element by element.

The kernel is csrc/infiniop/elementwise, shared with the C ABI's elementwise ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each element by its sigmoid.

    y = x / (1 + exp(-x)), in float32, rounded once; float64 in double. torch.ops.infini.silu_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous. Minus infinity gives NaN, as the formula and torch do.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.nn.functional.silu(x)

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415.
    """
    return torch.ops.infini.silu.default(x) if out is None else torch.ops.infini.silu.out(x, out=out)


def widened(x: Tensor) -> Tensor:
    """Return x in the dtype that its op computes in: float32 for half types."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def decomposition(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(widened(x)).to(x.dtype).contiguous()


SPEC = OpSpec(silu, fake=like_first, inplace="x", decomposition=decomposition)
