"""RoPE: rotary position embedding with its own tables."""

from __future__ import annotations

import torch

from ...device import device as Device
from ...dtype import dtype as DataType
from ...dtype import float32
from ...lib import _infinicore
from ...tensor import Tensor, from_torch
from ...utils import to_torch_dtype
from .. import functional
from .module import Module


class RoPE(Module):
    """Rotary position embedding, applied in place.

    Args:
        max_position_embeddings: Rows of the tables.
        rope_theta: Pair i of a head is rotated by position * rope_theta ** (-2 i / head_dim).
        head_dim: Size of a head, even.
        device: The tables' device; None: the CPU.
        dtype: The tables' dtype (they are computed in float64); None: float32.
    """

    def __init__(
        self,
        max_position_embeddings: int,
        rope_theta: float,
        head_dim: int,
        device: Device | str | None = None,
        dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"infinicore.nn.RoPE: head_dim must be even, got {head_dim}")
        self.max_position_embeddings, self.rope_theta, self.head_dim = max_position_embeddings, rope_theta, head_dim
        turns = rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_position_embeddings, dtype=torch.float64), turns)
        kind, place = to_torch_dtype(dtype or float32), device or Device("cpu")
        for name, table in (("sin_table", angles.sin()), ("cos_table", angles.cos())):
            self.register_buffer(name, from_torch(table.to(kind)).to(place), persistent=False)

    def forward(
        self,
        states: Tensor,
        position_ids: Tensor,
        algo: _infinicore.RoPEAlgo = functional.RopeAlgo.GPT_NEOX,
    ) -> Tensor:
        """Rotate states, [n, heads, head_dim] or [batch, n, heads, head_dim], in place, and return them."""
        return functional.rope(states, position_ids, self.sin_table, self.cos_table, algo, out=states)

    def extra_repr(self) -> str:
        return f"{self.max_position_embeddings}, rope_theta={self.rope_theta}, head_dim={self.head_dim}"
