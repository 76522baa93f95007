"""Other memory layouts of the same values, as callers pass them who slice, transpose and reinterpret."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def strided_rows(t: Tensor) -> Tensor:
    """Copy into a slice of a wider tensor: rows are spaced, like q, k and v in a fused product."""
    if t.dim() == 0:
        return t
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 24), 77, dtype=t.dtype, device=t.device)
    wide[..., 8 : 8 + t.shape[-1]] = t
    return wide[..., 8 : 8 + t.shape[-1]]


def misaligned(t: Tensor) -> Tensor:
    """Copy to one element after the start of a storage: aligned for no vector load."""
    moved = torch.full((t.numel() + 1,), 77, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    return moved.copy_(t)


def permuted_rows(t: Tensor) -> Tensor:
    """Copy with the first two dimensions swapped in memory (the last dimension stays dense)."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t


def strided_columns(t: Tensor) -> Tensor:
    """Copy into every second element of a tensor twice as wide: stride 2 in the last dimension."""
    if t.dim() == 0:
        return t
    wide = torch.full((*t.shape, 2), 77, dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


# name: (layout, whether every op must support it); ops may reject the others with a message.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "strided rows": (strided_rows, True),
    "misaligned": (misaligned, True),
    "permuted rows": (permuted_rows, True),
    "strided columns": (strided_columns, False),
}


def relayout(name: str, value: Any) -> Any:
    """Return the value with its tensors in the named layout."""
    return LAYOUTS[name][0](value) if isinstance(value, Tensor) else value
