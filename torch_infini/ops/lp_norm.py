"""lp_norm: vectors along any dimension, divided by their p-norm.

The kernel is csrc/infiniop/lp_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def lp_norm(x: Tensor, p: int = 2, dim: int = -1, eps: float = 1e-12, *, out: Tensor | None = None) -> Tensor:
    """Divide the values along a dimension by their p-norm.

    y = x / (norm + eps), norm = (sum of |x|^p)^(1 / p) along dim; in float32, rounded once. Intermediate powers may
    exceed float32's range. torch.nn.functional.normalize divides by max(norm, eps) instead of norm + eps, which differs
    only for norms about as small as eps. torch.ops.infini.lp_norm_(x, p, dim, eps) overwrites x.

    Args:
        x: At least one dimension, float32, bfloat16 or float16; any strides.
        p: A whole number of at least 1.
        dim: The dimension; a negative one counts from the last.
        eps: Added to the norm; at least 0. With 0 a vector of zeros becomes NaN.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, p, dim or eps, or an out that overlaps x.

    Equivalent to:
        >>> y = torch.nn.functional.normalize(x, p, dim, eps)

    Source: Riesz, Untersuchungen ueber Systeme integrierbarer Funktionen, 1910, for the norm.
    """
    op = torch.ops.infini.lp_norm
    return op.default(x, p, dim, eps) if out is None else op.out(x, p, dim, eps, out=out)


SPEC = OpSpec(lp_norm, fake=like_first, inplace="x")
