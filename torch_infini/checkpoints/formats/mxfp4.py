"""MXFP4: FP4 (E2M1) times a power of two (E8M0) for each 32 columns, as compressed-tensors stores it.

Weights are dequantized, because no op takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..weight import Expected, StoredFormat, by_group, columns_in, groups_of, rows_in

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa; the fourth bit is the sign


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


def fp4(values: Tensor) -> Tensor:
    """Return the values of FP4 (E2M1) codes from 0 to 15, in float64."""
    return torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float64)[values.long()]


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (e - 127) of E8M0 exponents, in float64."""
    return (exponents.double() - 127).exp2()  # exact for integers
