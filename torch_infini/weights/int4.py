"""int4: a scale and a zero per group of 64 (or 32) weights of a row. The op is infini::linear_int4."""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantize
from .format import Format, Integers, TensorSpec
from .quantize import quantizes_x


class Int4(Format):
    name = serves = "int4"
    exact, order = "int4_groups", 1
    groups = (64, 32)

    def group(self, k: int) -> int:
        for group in self.groups:
            if k % group == 0:
                return group
        raise ValueError(f"be a multiple of {self.groups[-1]}, int4's smallest group")

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        # Scales in half precision, because float32 scales would take a fifth of the memory.
        of_group = TensorSpec((n, k // group), dtype, group)
        return {"weight": TensorSpec((n, k // 2), torch.uint8, 2), "scales": of_group, "zeros": of_group}

    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        assert to.scales is not None and to.zeros is not None
        rows = slice(first_row, first_row + weight.shape[0])
        group = weight.shape[1] // to.scales.shape[1]
        quantize.quantize_int4(weight, group, out=(to.weight[rows], to.scales[rows], to.zeros[rows]))

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        assert of.scales is not None
        some = slice(first, first + rows)
        zeros = None if of.zeros is None else of.zeros[some]
        return quantize.dequantize_int4(of.weight[some], of.scales[some], zeros, dtype)

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op = torch.ops.infini.linear_int4
        of = (x, by.weight, by.scales, by.zeros, bias, self.quantizes_x(x, same_bits))
        return op.default(*of) if out is None else op.out(*of, out=out)

    def quantizes_x(self, x: Tensor, same_bits: bool) -> bool:
        return quantizes_x(x, 4, same_bits=same_bits)


FORMAT = Int4()
