"""MXFP4: FP4 (E2M1) times a power of two (E8M0) for each 32 columns, as compressed-tensors stores it.

linear_blocks takes them in GGML's blocks, whose nibbles have another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._blocks import KINDS
from ...ops._blocks.ggml import fp4, power_of_two
from ..weight import (
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    by_group,
    columns_in,
    dense_weight,
    groups_of,
    rows_in,
)

KIND = KINDS["mxfp4"]


@dataclass(frozen=True)
class MXFP4(StoredFormat):
    """compressed-tensors' mxfp4-pack-quantized: FP4 (E2M1) times a power of two for each 32 columns."""

    name: str = "compressed-tensors mxfp4-pack-quantized"
    scales: str = "weight_scale"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, pairs = shapes["weight_packed"]
        return n, 2 * pairs

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups_of(k, 32)
        return {
            "weight_packed": Expected(((rows_in(n), columns_in(k, 2)),), (torch.uint8,)),
            "weight_scale": Expected(((rows_in(n), columns_in(k, 32)),), (torch.uint8,)),
        }

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        if (tensors["weight_scale"] == 255).any():
            return "weight_scale", "be finite", "NaN (255 as an exponent)"
        return None

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        packed, exponents = tensors["weight_packed"][rows], tensors["weight_scale"][rows]
        q = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        return fp4(q) * by_group(power_of_two(exponents), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        if not target.takes_blocks:
            return dense_weight(self, tensors, n, k, target.dtype)
        blocks = torch.empty(n, k // 32, KIND.bytes, dtype=torch.uint8)
        blocks[..., 0] = tensors["weight_scale"]
        # Here a byte has two neighbours, in GGML's blocks the elements i and i + 16.
        packed = tensors["weight_packed"].unflatten(1, (-1, 2, 8))
        low, high = packed & 15, packed >> 4
        first, second = (torch.stack((low[:, :, i], high[:, :, i]), -1).flatten(2) for i in range(2))
        blocks[..., 1:] = first | second << 4
        return LinearWeight(KIND.name, blocks)
