"""swiglu: the gated activation between the projections of a LLaMA-type feed-forward layer.

The kernel is csrc/infiniop/elementwise, shared with the C ABI's elementwise ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .silu import widened


def swiglu(gate: Tensor, up: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Multiply up by the sigmoid linear unit of gate.

    y = gate / (1 + exp(-gate)) * up, in float32, rounded once; float64 in double.

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
        >>> y = torch.nn.functional.silu(gate) * up

    Source: Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.
    """
    return torch.ops.infini.swiglu.default(gate, up) if out is None else torch.ops.infini.swiglu.out(gate, up, out=out)


def fake(gate: Tensor, up: Tensor | None = None) -> Tensor:
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    return gate.new_empty(shape)


def decomposition(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        d = gate.shape[-1] // 2
        gate, up = gate.narrow(-1, 0, d), gate.narrow(-1, d, d)
    return (torch.nn.functional.silu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


SPEC = OpSpec(swiglu, fake=fake, decomposition=decomposition)
