"""The layout that linear_packed reads and pack_linear writes: the shape, and both conversions in plain torch.

csrc/infiniop/linear_packed/linear_packed.h describes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 48  # rows per panel


def packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Return the shape of a packed weight with n rows of k elements."""
    return -(-n // PANEL), -(-k // 2), PANEL, 2


def unpack_linear(packed: Tensor, n: int, k: int, first_row: int = 0) -> Tensor:
    """Return rows first_row .. first_row + n - 1 of a packed weight, of k elements each: [n, k], contiguous."""
    first, last = first_row // PANEL, -(-(first_row + n) // PANEL)
    rows = packed[first:last].transpose(1, 2).flatten(2).flatten(0, 1)
    return rows[first_row - first * PANEL :][:n, :k].contiguous()


def put_rows(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Pack rows as the op pack_linear does, in plain torch."""
    n, k = weight.shape
    if weight.numel():
        row = torch.arange(first_row, first_row + n)
        packed[row // PANEL, :, row % PANEL] = torch.nn.functional.pad(weight, (0, k % 2)).unflatten(1, (-1, 2))
