"""rope: rotary position embedding, in the half-split layout of GPT-NeoX and Llama or the interleaved one of GPT-J.

The kernel is csrc/infiniop/rope.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate each pair of columns of every head by its token's angle for that pair.

    y0 = x0 cos - x1 sin and y1 = x1 cos + x0 sin for the pairs (x0, x1) of the first R columns, where R is twice the
    columns of cos; the other D - R columns are copied (partial rotary). In float32, rounded once; float64 in float64.

    Args:
        x: [S, H, D] or [B, S, H, D] (tokens, heads, head dimension) float32, bfloat16, float16 or float64; stride 1 in
            the last dimension, any other strides: a Hugging Face [B, H, S, D] tensor comes as its transpose(1, 2).
        cos: Of x's dtype, or float32 if that is a half type. With positions, a table [P, R/2] with a row per position;
            without, row t belongs to token t: [S, R/2] or [B or 1, S, R/2]. Stride 1 in the last dimension, any other
            strides. Pass wider tables as views: those of transformers, [..., R] with equal halves, as cos[..., : R //
            2]; the joint table of vLLM and SGLang, [P, R], as its chunk(2, -1). Shapes cannot distinguish them: [P, R]
            is also a valid table for 2R columns.
        sin: The shape and dtype of cos.
        positions: [S], [1, S] or [B, S] integers: the row of cos and sin for each token. On CUDA the kernel reads them:
            a token whose position is outside the table gets NaN in the first R columns.
        interleaved: False: the pairs are columns i and i + R/2 (GPT-NeoX; Llama in Hugging Face's order). True: columns
            2i and 2i + 1 (GPT-J).
        out: Written and returned instead of a new tensor; may be x itself, as in torch.ops.infini.rope_.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or, on the CPU, a position outside the table.

    Equivalent to:
        >>> if positions is not None:
        >>>     cos, sin = cos[positions], sin[positions]
        >>> c, s = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
        >>> r = 2 * cos.shape[-1]
        >>> x0, x1 = (x[..., :r:2], x[..., 1:r:2]) if interleaved else x[..., :r].chunk(2, -1)
        >>> y0, y1 = x0 * c - x1 * s, x1 * c + x0 * s
        >>> y = torch.stack((y0, y1), -1).flatten(-2) if interleaved else torch.cat((y0, y1), -1)
        >>> y = torch.cat((y.to(x.dtype), x[..., r:]), -1)

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, arXiv:2104.09864.
    """
    if out is None:
        return torch.ops.infini.rope.default(x, cos, sin, positions, interleaved)
    return torch.ops.infini.rope.out(x, cos, sin, positions, interleaved, out=out)


SPEC = OpSpec(rope, fake=like_first, inplace="x")
