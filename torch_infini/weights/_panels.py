"""Formats that store rows in panels of 16, with a scale per 16 columns.

They are quantized on the CPU and multiplied on the CPU and on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import library
from .._core.devices import backing_type
from ..ops._panels import BLOCK, PANEL, Panels
from .format import Format, Integers, TensorSpec


class PanelFormat(Format):
    """A format of the ops infini::linear_NAME and infini::quantize_NAME."""

    panel = PANEL
    panels: Panels
    serves_experts = True

    def serves_on(self, device: torch.device) -> bool:
        return backing_type(device) in ("cpu", "cuda")

    def quantizes_on(self, device: torch.device) -> bool:
        # Emulated CUDA, whose tensors are on the CPU, uses CUDA's formats.
        return self.serves_on(device) and backing_type(device) == "cpu" and not library.emulates_cuda()

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        packed = TensorSpec(self.panels.packed_shape(n, k), torch.uint8, BLOCK, PANEL)
        return {"weight": packed, "scales": TensorSpec((n,), torch.float32)}

    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        if backing_type(to.weight.device) != "cpu":
            raise ValueError(
                f"torch_infini.weights.{self.name}: weight must be quantized on the CPU (then move the layer), got one "
                f"on {to.weight.device}"
            )
        assert to.scales is not None
        weight = weight.detach()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        getattr(torch.ops.infini, f"quantize_{self.name}").default(to.weight, to.scales, weight, first_row)
        if not to.scales[first_row : first_row + weight.shape[0]].isfinite().all():
            raise ValueError(f"torch_infini.weights.{self.name}: weight must be finite, got infinity or NaN in it")

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        assert of.scales is not None
        begin, end = first // PANEL, -(-(first + rows) // PANEL)
        scales = of.scales[begin * PANEL : first + rows]
        return self.panels.dequantize(of.weight[begin:end], scales, k, dtype)[first - begin * PANEL :]

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op = getattr(torch.ops.infini, f"linear_{self.name}")
        of = (x, by.weight, by.scales, bias)
        y: Tensor = op.default(*of) if out is None else op.out(*of, out=out)
        return y

    def put(self, some: Tensor, first: int, to: Tensor, row: int, rows: int) -> None:
        if some.dim() == 1:
            super().put(some, first, to, row, rows)
        else:
            self.panels.copy_rows(some, first, to, row, rows)
