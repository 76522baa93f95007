"""causal_softmax: softmax over the last dimension with a causal mask: attention's weights.

The kernel is csrc/infiniop/causal_softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def causal_softmax(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute the softmax of the last dimension, where query i of the last q of k tokens sees the tokens up to itself.

    y[i, j] = exp(x[i, j] - m_i) / sum over j' <= k - q + i of exp(x[i, j'] - m_i) for j <= k - q + i, with m_i the
    largest x[i, j] there, and 0 for the other j; in float32, rounded once.

    Args:
        x: [..., q, k] float32, bfloat16 or float16, q <= k; any strides. If all visible elements of a row are -inf, the
            result there is NaN, as in torch.softmax.
        out: Written and returned instead of a new tensor; may be x itself, as in torch.ops.infini.causal_softmax_.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> q, k = x.shape[-2:]
        >>> hidden = torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)
        >>> y = torch.softmax(x.masked_fill(hidden, -torch.inf), -1)

    Source: Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762, section 3.2.3.
    """
    op = torch.ops.infini.causal_softmax
    return op.default(x) if out is None else op.out(x, out=out)


SPEC = OpSpec(causal_softmax, fake=like_first, inplace="x")
