"""MergedLinear: projections of one input whose weights have different formats, concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .linear import Linear


class _Parts(nn.ModuleList):
    """A ModuleList of Linear layers."""

    if TYPE_CHECKING:  # torch's ModuleList does not know the type of its modules

        def __iter__(self) -> Iterator[Linear]: ...


class MergedLinear(nn.Module):
    """y = [part(x) for part in parts], concatenated by columns; each part is a separate product.

    Checkpoints such as GGUF may store q, k and v in different formats, but a Linear has one format.

    Args:
        parts: Linear layers of equal in_features and dtype, without bias.
        bias: The bias of all parts, [n], or None.

    Attributes:
        parts: The given parts.
        bias: The given bias; the parts have views of it.
        in_features, out_features, dtype: As in Linear.
        format: "merged".
    """

    def __init__(self, parts: Sequence[Linear], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.parts = _Parts(parts)
        self.sizes = [part.out_features for part in parts]
        self.in_features, self.out_features, self.dtype = parts[0].in_features, sum(self.sizes), parts[0].dtype
        self.format = "merged"
        self.bias = bias

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute [..., n], in `out` if it is given."""
        y = x.new_empty(*x.shape[:-1], self.out_features) if out is None else out
        first = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            part(x, y[..., first : first + size])
            first += size
        return y

    def load(self, weight: Tensor, first_row: int = 0) -> None:
        """Copy rows of a full-precision weight, as Linear.load does; they must belong to one part."""
        for part, size in zip(self.parts, self.sizes, strict=True):
            if first_row < size:
                part.load(weight, first_row)
                return
            first_row -= size

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return rows of the weight in full precision, a copy."""
        return torch.cat([part.dense() for part in self.parts])[rows]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
