"""table4: 4-bit indices into a table, a scale for each 16 columns: 4.5 bits a weight. The op is infini::linear_table4.

On the CPU it is what models take for weights="int4": at as many bits its error is 0.7 of int4's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .._devices import backing_type
from ..ops._table4 import BLOCK, BLOCK_BYTES, PANEL, copy_rows, dequantize, packed_shape
from .format import Format, Integers, Kind


class _Table4(Format):
    name, serves = "table4", "int4"
    panel = PANEL

    def serves_on(self, device: torch.device) -> bool:
        return backing_type(device) == "cpu" and not _library.emulates_cuda()

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, Kind]:
        panels, blocks, _ = packed_shape(n, k)
        packed = Kind((panels, blocks, BLOCK_BYTES), torch.uint8, BLOCK, PANEL)
        return {"weight": packed, "scales": Kind((n,), torch.float32)}

    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        weight = weight.detach()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        torch.ops.infini.quantize_table4.default(to.weight, to.scales, weight, first_row)
        if not to.scales[first_row : first_row + weight.shape[0]].isfinite().all():
            raise ValueError("torch_infini.weights.table4: weight must be finite, got infinity or NaN in it")

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        begin, end = first // PANEL, -(-(first + rows) // PANEL)
        scales = of.scales[begin * PANEL : first + rows]
        return dequantize(of.weight[begin:end], scales, k, dtype)[first - begin * PANEL :]

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op = torch.ops.infini.linear_table4
        of = (x, by.weight, by.scales, bias)
        return op.default(*of) if out is None else op.out(*of, out=out)

    def put(self, some: Tensor, first: int, to: Tensor, row: int, rows: int) -> None:
        if some.dim() == 1:
            super().put(some, first, to, row, rows)
        else:
            copy_rows(some, first, to, row, rows)


FORMAT = _Table4()
