"""int8: a scale per row of the weight. The op is infini::linear_int8."""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantize
from .format import Format, Integers, TensorSpec
from .quantize import quantizes_x


class Int8(Format):
    name = serves = "int8"
    exact, order = "int8_rows", 1

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((n, k), torch.int8), "scales": TensorSpec((n,), torch.float32)}

    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        assert to.scales is not None
        rows = slice(first_row, first_row + weight.shape[0])
        quantize.quantize_int8(weight, out=(to.weight[rows], to.scales[rows]))

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        assert of.scales is not None
        some = slice(first, first + rows)
        return quantize.dequantize_int8(of.weight[some], of.scales[some], dtype)

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op = torch.ops.infini.linear_int8
        of = (x, by.weight, by.scales, bias, self.quantizes_x(x, same_bits))
        return op.default(*of) if out is None else op.out(*of, out=out)

    def quantizes_x(self, x: Tensor, same_bits: bool) -> bool:
        return quantizes_x(x, 8, same_bits=same_bits)


FORMAT = Int8()
