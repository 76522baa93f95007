"""geglu: the gated activation between the projections of a Gemma-type feed-forward layer.

The kernel is csrc/infiniop/elementwise, shared with the other elementwise ops; samples, errors and costs are swiglu's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._registry import OpSpec
from .silu import widened
from .swiglu import fake

SLOPE = 2 * math.sqrt(2 / math.pi)


def geglu(gate: Tensor, up: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Multiply up by the Gaussian error linear unit of gate, in its approximation by tanh.

    y = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up, in float32, rounded once; float64 in
    double. Far below 0 the relative error stays small, unlike with torch's formula.

    Args:
        gate: [..., d] float32, bfloat16, float16 or float64; any strides. Without up: [..., 2 d], the product of one
            fused projection, gate in the first half of each row and up in the second.
        up: [..., d], of gate's shape and dtype.
        out: [..., d], written and returned instead of a new tensor; may be gate or up itself.

    Returns:
        [..., d], contiguous; of gate's dtype.

    Raises:
        RuntimeError: For an unsupported shape or dtype, or an out that is broadcast or overlaps gate or up.

    Equivalent to:
        >>> gate, up = (gate, up) if up is not None else gate.chunk(2, dim=-1)
        >>> y = torch.nn.functional.gelu(gate, approximate="tanh") * up

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415; Shazeer, GLU Variants Improve
        Transformer, 2020, arXiv:2002.05202.
    """
    return torch.ops.infini.geglu.default(gate, up) if out is None else torch.ops.infini.geglu.out(gate, up, out=out)


def formula(gate: Tensor, up: Tensor) -> Tensor:
    """Compute (1 + tanh(u)) / 2 as the sigmoid of 2u, which has no cancellation."""
    return gate * torch.sigmoid(gate * (SLOPE + 0.044715 * SLOPE * gate * gate)) * up


def decomposition(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        d = gate.shape[-1] // 2
        gate, up = gate.narrow(-1, 0, d), gate.narrow(-1, d, d)
    return formula(widened(gate), widened(up)).to(gate.dtype).contiguous()


SPEC = OpSpec(geglu, fake=fake, decomposition=decomposition)
