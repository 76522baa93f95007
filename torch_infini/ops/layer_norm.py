"""layer_norm: mean 0 and variance 1 over the last dimension, then a scale and a shift for each column.

The kernel is csrc/infiniop/layer_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Normalize the rows of x to mean 0 and variance 1, scale the columns and shift them.

    y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension, where var is the mean of (x - mean)^2,
    without Bessel's correction; in float32, rounded once. The variance is computed about the mean, so it stays accurate
    if the mean is far from 0. torch.ops.infini.layer_norm_(x, weight, bias, eps) overwrites x.

    Args:
        x: [..., n] float32, bfloat16 or float16; any strides.
        weight: [n], dtype of x or float32, or None: no scale.
        bias: [n], dtype of x or float32, or None: no shift; the dtype of weight if both are given.
        eps: Added to the variance; at least 0.
        out: Written and returned instead of a new tensor; may be x itself; must not share memory with weight and bias.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape or dtype, a negative or NaN eps, or an out that overlaps its
            inputs.

    Equivalent to:
        >>> y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, arXiv:1607.06450.
    """
    op = torch.ops.infini.layer_norm
    return op.default(x, weight, bias, eps) if out is None else op.out(x, weight, bias, eps, out=out)


SPEC = OpSpec(layer_norm, fake=like_first, inplace="x")
