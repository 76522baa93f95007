"""topksoftmax and topkrouter: the experts of a mixture (MoE) that each token is routed to, and their weights.

The kernels are in csrc/infiniop/topk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def topksoftmax(
    x: Tensor, k: int = 8, normalize: bool = False, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest of softmax(x) in each row, largest first: routing as in Mixtral and Qwen-MoE.

    Chosen and ordered by x: among equal values the lower index comes first; NaN comes before all numbers (and makes all
    values of its row NaN). In float32 throughout.

    Args:
        x: [tokens, experts] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        k: The number of experts per token, from 1 to all.
        normalize: Divide the values by their sum.
        out: (values, indices), written and returned; they must not share memory with x or each other.

    Returns:
        (values, indices): [tokens, k] float32 and [tokens, k] int32, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or k.

    Equivalent to:
        >>> values, indices = torch.softmax(x, -1, dtype=torch.float32).topk(k, -1)
        >>> values, indices = values / values.sum(-1, keepdim=True) if normalize else values, indices.int()

    Source: Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017,
        arXiv:1701.06538.
    """
    op = torch.ops.infini.topksoftmax
    return op.default(x, k, normalize) if out is None else op.out(x, k, normalize, out0=out[0], out1=out[1])


def topkrouter(
    x: Tensor,
    correction_bias: Tensor,
    k: int = 8,
    routed_scaling_factor: float = 2.5,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token as DeepSeek-V3 does: among 256 in 8 groups of 32, of which 4 are kept.

    s = sigmoid(x), c = s + correction_bias; a group's score is the sum of its two largest c; the 4 groups with the
    largest scores are kept, and in the others c becomes 0 (not -inf: with negative c, or k above 128, their experts may
    be chosen); indices are those of the k largest c, largest first; values = s[indices] * routed_scaling_factor / (sum
    of s[indices] + 1e-9). In float32 throughout. Among equal experts or groups the lower index comes first; NaN comes
    before all numbers.

    Args:
        x: [tokens, 256] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        correction_bias: [256] float32, any stride.
        k: The number of experts per token, 1 to 256.
        routed_scaling_factor: The sum of a row's values.
        out: (values, indices), written and returned; they must not share memory with the arguments or each other.

    Returns:
        (values, indices): [tokens, k] float32 and [tokens, k] int32, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or k.

    Equivalent to:
        >>> s = torch.sigmoid(x.float())
        >>> c = (s + correction_bias).view(-1, 8, 32)
        >>> kept = c.topk(2, -1).values.sum(-1).topk(4, -1).indices
        >>> mask = torch.zeros(c.shape[:2], dtype=torch.bool).scatter(-1, kept, True)
        >>> c = torch.where(mask.unsqueeze(-1), c, 0)
        >>> indices = c.flatten(1).topk(k, -1).indices
        >>> values = s.gather(-1, indices)
        >>> values, indices = values * routed_scaling_factor / (values.sum(-1, keepdim=True) + 1e-9), indices.int()

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, arXiv:2412.19437, section 2.1.2.
    """
    if out is None:
        return torch.ops.infini.topkrouter.default(x, correction_bias, k, routed_scaling_factor)
    return torch.ops.infini.topkrouter.out(x, correction_bias, k, routed_scaling_factor, out0=out[0], out1=out[1])


def softmax_fake(x: Tensor, k: int = 8, normalize: bool = False) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def router_fake(
    x: Tensor, correction_bias: Tensor, k: int = 8, routed_scaling_factor: float = 2.5
) -> tuple[Tensor, Tensor]:
    return softmax_fake(x, k)


SPECS = (
    OpSpec(topksoftmax, fake=softmax_fake),
    OpSpec(topkrouter, fake=router_fake),
)
