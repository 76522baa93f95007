"""Formats of one element a byte, multiplied by a scale: int8 and FP8 of compressed-tensors, FP8 in blocks, and MXFP4.

linear_int8 multiplies by integers with a scale for each row; the others are dequantized, for want of an op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import groups_of, whole_words
from .weight import FLOATS, Expected, LinearWeight, by_group, dense_weight, not_finite

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa; the fourth bit is the sign


@dataclass(frozen=True)
class IntQuantized:
    """compressed-tensors' int-quantized: (q - z) * scale, q of int8.

    Attributes:
        group_size: Columns with one scale; -1: all.
        symmetric: Whether there are no zero points.
    """

    group_size: int = -1
    symmetric: bool = True
    name: str = "compressed-tensors int-quantized"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups = groups_of(k, self.group_size)
        shapes = ((n, groups), (n,), (1,), ()) if groups == 1 else ((n, groups),)
        tensors = {"weight": Expected(((n, k),), (torch.int8,)), "weight_scale": Expected(shapes, FLOATS)}
        if not self.symmetric:
            tensors["weight_zero_point"] = Expected(shapes, (torch.int8,))
        return tensors

    def small(self) -> tuple[str, ...]:
        return ("weight_scale",)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return not_finite("weight_scale", tensors["weight_scale"])

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        q, scales = tensors["weight"][rows].double(), by_row(tensors["weight_scale"], n)[rows]
        if not self.symmetric:
            q = q - by_group(by_row(tensors["weight_zero_point"], n)[rows], k)
        return q * by_group(scales, k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        if groups_of(k, self.group_size) > 1 or not self.symmetric:
            return dense_weight(self, tensors, n, k, dtype)
        scales = by_row(tensors["weight_scale"], n)[:, 0].float().contiguous()
        return LinearWeight("int8", tensors["weight"], scales)


@dataclass(frozen=True)
class Float8:
    """q * scale, q of float8_e4m3fn: a scale for the tensor, for each row, or for each block.

    Attributes:
        scale: Name of the scales.
        block: Rows and columns of a block; None: a scale for each row, or one for all.
        name: compressed-tensors float-quantized, fp8 or fbgemm_fp8.
    """

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    name: str = "fp8"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        shapes: tuple[tuple[int, ...], ...] = ((n, 1), (n,), (1,), ())
        if self.block is not None:
            shapes = ((-(-n // self.block[0]), -(-k // self.block[1])),)
        return {
            "weight": Expected(((n, k),), (torch.float8_e4m3fn,)),
            self.scale: Expected(shapes, FLOATS),
            "input_scale": Expected(((), (1,)), FLOATS, optional=True),  # of activations, which stay as they are
            "input_scale_ub": Expected(((), (1,)), FLOATS, optional=True),
        }

    def small(self) -> tuple[str, ...]:
        return (self.scale,)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return not_finite(self.scale, tensors[self.scale])

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        q, scales = tensors["weight"][rows].double(), tensors[self.scale].double()
        if self.block is None:
            return q * by_row(scales, n)[rows]
        height, width = self.block
        row = torch.arange(n)[rows] // height
        return q * scales[row].repeat_interleave(width, 1)[:, :k]

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        return dense_weight(self, tensors, n, k, dtype)


@dataclass(frozen=True)
class MXFP4:
    """compressed-tensors' mxfp4-pack-quantized: FP4 (E2M1) times a power of two for each 32 columns."""

    name: str = "compressed-tensors mxfp4-pack-quantized"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, pairs = shapes["weight_packed"]
        return n, 2 * pairs

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups = groups_of(k, 32)
        return {
            "weight_packed": Expected(((n, whole_words("in_features", k, 2)),), (torch.uint8,)),
            "weight_scale": Expected(((n, groups),), (torch.uint8,)),
        }

    def small(self) -> tuple[str, ...]:
        return ("weight_scale",)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        if (tensors["weight_scale"] == 255).any():
            return "weight_scale", "be finite", "NaN (255 as an exponent)"
        return None

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        packed, exponents = tensors["weight_packed"][rows], tensors["weight_scale"][rows]
        q = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        return fp4(q) * by_group(power_of_two(exponents), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        return dense_weight(self, tensors, n, k, dtype)


def by_row(scales: Tensor, n: int) -> Tensor:
    """A scale for each row, or one for all, as [n, groups]."""
    return scales.reshape(1, 1).expand(n, 1) if scales.numel() == 1 else scales.reshape(n, -1)


def fp4(values: Tensor) -> Tensor:
    """The values of FP4 (E2M1) codes from 0 to 15, in float64."""
    return torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float64)[values.long()]


def power_of_two(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) of E8M0 exponents, in float64."""
    return (exponents.double() - 127).exp2()  # exact for integers
