"""SwiGLU: the MLP of LLaMA. Gate and up are one product; the ops are infini::linear and infini::swiglu."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .linear import Linear


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)).

    Args:
        size: Columns of x and y.
        inner: Columns of gate's and up's results.
        bias: Whether the three projections have a bias.
        format: The weights' format, as in Linear.
        dtype: The dtype of x.
        device: The weights' device.

    Attributes:
        gate_up: Linear whose weight is gate's and up's, concatenated by rows.
        down: Linear.

    Equivalent to:
        >>> gate, up = mlp.gate_up.dense().chunk(2)
        >>> y = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.dense().T

    Source: Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.
    """

    def __init__(
        self,
        size: int,
        inner: int,
        bias: bool = False,
        format: str = "dense",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * inner, bias, format, dtype, device)
        self.down = Linear(inner, size, bias, format, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., size] of x [..., size]."""
        return self.down(torch.ops.infini.swiglu.default(self.gate_up(x)))
