"""Weights in the blocks of checkpoints (GGUF's, FP8, NF4), each with its own scales: a format for every kind of block.

They are read from checkpoints as they lie, never quantized here. The op is infini::linear_blocks, on the CPU alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import library
from .._core.devices import backing_type
from ..ops._blocks import KINDS, BlockKind
from .format import Format, Integers, TensorSpec

_CHUNK = 1 << 20  # elements that are dequantized at a time: the formulas compute in float64


class BlockFormat(Format):
    """The blocks of one kind."""

    serves, op = "", "linear_blocks"

    def __init__(self, kind: BlockKind) -> None:
        self.name, self.kind = kind.name, kind

    def serves_on(self, device: torch.device) -> bool:
        return backing_type(device) == "cpu" and not library.emulates_cuda()

    def quantizes_on(self, device: torch.device) -> bool:
        return False

    def group(self, k: int) -> int:
        if k % self.kind.elements:
            raise ValueError(f"be a multiple of {self.kind.elements}, the elements of a block of {self.name}")
        return 0

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        shape = n, k // self.kind.elements, self.kind.bytes
        return {"weight": TensorSpec(shape, torch.uint8, self.kind.elements)}

    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        raise ValueError(
            f"torch_infini.weights.{self.name}: weight must be that of a checkpoint in such blocks (quantize to one of "
            "torch_infini.weights.names()), got one in full precision"
        )

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty(rows, k, dtype=dtype, device=of.weight.device)
        step = max(_CHUNK // max(k, 1), 1)
        for begin in range(0, rows, step):
            some = of.weight[first + begin : first + min(begin + step, rows)]
            # As the op does, round to float32 first.
            weight[begin : begin + step] = self.kind.dequantize(some, dtype if dtype.itemsize > 4 else torch.float32)
        return weight

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op, of = torch.ops.infini.linear_blocks, (x, by.weight, self.kind.number, bias)
        return op.default(*of) if out is None else op.out(*of, out=out)


FORMATS = tuple(BlockFormat(kind) for kind in KINDS.values())
