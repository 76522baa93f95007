"""softmax and log_softmax along any dimension.

The kernel is csrc/infiniop/softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def softmax(x: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Turn the values along a dimension into weights that sum to 1.

    y = exp(x - m) / sum of exp(x - m) along dim, where m is the largest x; in float32, rounded once.
    torch.ops.infini.softmax_(x, dim) overwrites x.

    Args:
        x: At least one dimension, float32, bfloat16 or float16; any strides.
        dim: The dimension; a negative one counts from the last.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous. If all x are -inf, or one is inf or NaN, all results are NaN, as in
        torch.softmax.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or dim, or an out that overlaps x.

    Equivalent to:
        >>> y = torch.softmax(x, dim)

    Source: Bridle, Probabilistic Interpretation of Feedforward Classification Network Outputs, 1990.
    """
    return torch.ops.infini.softmax.default(x, dim) if out is None else torch.ops.infini.softmax.out(x, dim, out=out)


def log_softmax(x: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Compute the logarithm of softmax: log-probabilities from logits.

    y = x - m - log(sum of exp(x - m)) along dim, where m is the largest x; in float32, rounded once.
    torch.ops.infini.log_softmax_(x, dim) overwrites x.

    Args:
        x: At least one dimension, float32, bfloat16 or float16; any strides.
        dim: The dimension; a negative one counts from the last.
        out: Written and returned instead of a new tensor: of any of the three dtypes (float32 keeps precision that half
            types would lose), or x itself.

    Returns:
        The shape and dtype of x, contiguous. If all x are -inf, or one is inf or NaN, all results are NaN, as in
        torch.log_softmax.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or dim, or an out that overlaps x.

    Equivalent to:
        >>> y = torch.log_softmax(x, dim)

    Source: Bridle, Probabilistic Interpretation of Feedforward Classification Network Outputs, 1990.
    """
    op = torch.ops.infini.log_softmax
    return op.default(x, dim) if out is None else op.out(x, dim, out=out)


def softmax_decomposition(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x.float(), dim).to(x.dtype, memory_format=torch.contiguous_format)


def log_softmax_decomposition(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x.float(), dim).to(x.dtype, memory_format=torch.contiguous_format)


SPECS = (
    OpSpec(softmax, fake=like_first, inplace="x", decomposition=softmax_decomposition),
    OpSpec(log_softmax, fake=like_first, inplace="x", decomposition=log_softmax_decomposition),
)
