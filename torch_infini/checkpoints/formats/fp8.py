"""FP8 (E4M3) times a scale for the tensor, for each row or for each block: fp8 and fbgemm_fp8.

linear_blocks takes weights with one scale for each 128 columns, or more; others are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._blocks import KINDS
from ..method import Fields, Method
from ..weight import (
    FLOATS,
    Dim,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    by_row,
    columns_in,
    dense_weight,
    rows_in,
)

KIND = KINDS["fp8"]


@dataclass(frozen=True)
class Float8(StoredFormat):
    """q * scale, q of float8_e4m3fn: a scale for the tensor, for each row, or for each block.

    Attributes:
        scales: The name of the tensor of scales.
        block: Rows and columns of a block; None: a scale for each row, or one for all.
        name: compressed-tensors float-quantized, fp8 or fbgemm_fp8.
    """

    scales: str = "weight_scale"
    block: tuple[int, int] | None = None
    name: str = "fp8"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        layouts: tuple[tuple[Dim, ...], ...] = ((rows_in(n), Dim(1)), (rows_in(n),), (Dim(1),), ())
        if self.block is not None:
            layouts = ((rows_in(n, self.block[0]), columns_in(k, self.block[1])),)
        one = ((), (Dim(1),))
        return {
            "weight": Expected(((rows_in(n), columns_in(k)),), (torch.float8_e4m3fn,)),
            self.scales: Expected(layouts, FLOATS),
            "input_scale": Expected(one, FLOATS, optional=True),  # of activations, which stay as they are
            "input_scale_ub": Expected(one, FLOATS, optional=True),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        q, scales = tensors["weight"][rows].double(), tensors[self.scales].double()
        if self.block is None:
            return q * by_row(scales, n)[rows]
        height, width = self.block
        row = torch.arange(n)[rows] // height
        return q * scales[row].repeat_interleave(width, 1)[:, :k]

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        height, width = (1, k) if self.block is None else self.block
        if k % KIND.elements or width % KIND.elements or not target.takes_blocks:
            return dense_weight(self, tensors, n, k, target.dtype)
        scales = tensors[self.scales].float()
        if self.block is None:
            scales = by_row(scales, n)
        scales = scales.repeat_interleave(height, 0)[:n].repeat_interleave(width // KIND.elements, 1)
        scales = scales[:, : k // KIND.elements].contiguous()
        blocks = torch.empty(n, k // KIND.elements, KIND.bytes, dtype=torch.uint8)
        blocks[..., :4] = scales[..., None].view(torch.uint8)
        blocks[..., 4:] = tensors["weight"].view(torch.uint8).unflatten(1, (-1, KIND.elements))
        return LinearWeight(KIND.name, blocks)


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    format = Float8()
    if fields["weight_block_size"] is not None:
        format = Float8("weight_scale_inv", fields.block("weight_block_size"), "fp8 in blocks")
    return lambda name: format


METHODS = (
    Method("fp8", ("weight_scale_inv", "weight_scale"), _parse),
    Method("fbgemm_fp8", ("weight_scale",), lambda fields: lambda name: Float8(name="fbgemm_fp8")),
)
