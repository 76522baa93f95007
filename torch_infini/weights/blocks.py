"""Weights in the blocks of checkpoints (GGUF's, FP8, NF4), each with its own scales: a format for every kind of block.

They are read from checkpoints as they lie, never quantized here. The op is infini::linear_blocks, or for blocks that
`in_panels` has laid out infini::linear_block_panels, which is on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core import library
from .._core.devices import backing_type
from .._core.memory import allocate
from ..ops._block_panels import NUMBERS, PANEL, packed_shape
from ..ops._blocks import KINDS, BlockKind
from .format import Format, Integers, TensorSpec

PANEL_LEVELS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")  # where panels are faster than rows
_CHUNK = 1 << 20  # elements that are dequantized at a time: the formulas compute in float64


class BlockFormat(Format):
    """The blocks of one kind."""

    serves, op = "", "linear_blocks"

    def __init__(self, kind: BlockKind) -> None:
        self.name, self.kind = kind.name, kind

    def serves_on(self, device: torch.device) -> bool:
        return backing_type(device) in ("cpu", "cuda")

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


class BlockPanelFormat(BlockFormat):
    """The blocks of one kind in panels of 16 rows, of which there are only whole ones."""

    op, panel = "linear_block_panels", PANEL

    def __init__(self, kind: BlockKind) -> None:
        super().__init__(kind)
        self.name = f"{kind.name}_panels"

    def serves_on(self, device: torch.device) -> bool:
        return backing_type(device) == "cpu" and not library.emulates_cuda()

    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        shape = packed_shape(self.kind.number, n, k)
        return {"weight": TensorSpec(shape, torch.uint8, self.kind.elements, PANEL)}

    def in_rows(self, of: Integers, first: int, rows: int) -> Tensor:
        """Return rows in blocks, as `BlockFormat` has them: a copy."""
        begin = first // PANEL * PANEL
        shape = first + rows - begin, of.weight.shape[1], self.kind.bytes
        blocks = torch.empty(shape, dtype=torch.uint8)
        torch.ops.infini.unpack_blocks.default(blocks, of.weight, self.kind.number, begin)
        return blocks[first - begin :]

    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        blocks = Integers(self.in_rows(of, first, rows)) if rows else Integers(of.weight.new_empty(0, 0, 0))
        return super().dequantize(blocks, 0, rows, k, dtype)

    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        op, of = torch.ops.infini.linear_block_panels, (x, by.weight, self.kind.number, bias)
        return op.default(*of) if out is None else op.out(*of, out=out)

    def put(self, some: Tensor, first: int, to: Tensor, row: int, rows: int) -> None:
        super().put(some, first // PANEL, to, row // PANEL, -(-rows // PANEL))


def panels_of(name: str, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Lay weights in blocks out in panels, one below the other, where their products are faster so.

    That is for bfloat16 at PANEL_LEVELS, without tiles, and for multiples of 16 rows.

    Args:
        name: The format, which may be any.
        weights: [n, k / elements, bytes] each, with the same k; they are not changed.
        dtype: The dtype of x.

    Returns:
        The weight of the format of panels, or None.
    """
    kind = KINDS.get(name)
    if kind is None or kind.number not in NUMBERS or library.capability not in PANEL_LEVELS or dtype != torch.bfloat16:
        return None
    if library.emulates_cuda() or any(backing_type(x.device) != "cpu" or len(x) % PANEL for x in weights):
        return None
    shape = packed_shape(kind.number, sum(map(len, weights)), weights[0].shape[1] * kind.elements)
    packed, first = allocate(*shape, dtype=torch.uint8), 0
    for weight in weights:
        torch.ops.infini.pack_blocks.default(packed, weight, kind.number, first)
        first += len(weight)
    return packed


def in_panels(name: str, integers: Integers, dtype: torch.dtype) -> tuple[str, Integers]:
    """Return (format, weight) of a weight as panels_of lays it out, a copy, or as it is where that is None."""
    packed = panels_of(name, [integers.weight], dtype)
    return (name, integers) if packed is None else (f"{name}_panels", Integers(packed))


def out_of_panels(name: str, integers: Integers) -> tuple[str, Integers]:
    """Return (format, weight) with the rows of a weight that `in_panels` has laid out, a copy; others as they are."""
    format = _BY_NAME.get(name)
    if not isinstance(format, BlockPanelFormat):
        return name, integers
    return format.kind.name, Integers(format.in_rows(integers, 0, PANEL * len(integers.weight)))


def served_on(device: torch.device, name: str, integers: Integers) -> tuple[str, Integers] | None:
    """Return (format, weight) of blocks as a device has kernels for them: as they are, or in rows; None for neither."""
    format = _BY_NAME[name]
    if format.serves_on(device):
        return name, integers
    return out_of_panels(name, integers) if _BY_NAME[format.kind.name].serves_on(device) else None


def experts_in_panels(name: str, blocks: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    """Return (format, weights) of experts' weights [experts, n, k / elements, bytes], as in_panels does of one."""
    experts, n = blocks.shape[:2]
    if n % PANEL:
        return name, blocks
    format, (packed, *_) = in_panels(name, Integers(blocks.flatten(0, 1)), dtype)
    return (name, blocks) if format == name else (format, packed.unflatten(0, (experts, n // PANEL)))


def experts_out_of_panels(name: str, weights: Tensor) -> tuple[str, Tensor]:
    """Return (format, weights) with the rows of weights that experts_in_panels has laid out; others as they are."""
    experts, n = weights.shape[0], PANEL * weights.shape[1]
    format, (blocks, *_) = out_of_panels(name, Integers(weights.flatten(0, 1)))
    return (name, weights) if format == name else (format, blocks.unflatten(0, (experts, n)))


FORMATS = (
    *(BlockFormat(kind) for kind in KINDS.values()),
    *(BlockPanelFormat(KINDS[name]) for name in NUMBERS.values()),
)
_BY_NAME = {one.name: one for one in FORMATS}
