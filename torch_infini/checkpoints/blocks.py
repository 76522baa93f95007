"""GGUF's block formats, whose formulas are in ops/_blocks. Blocks stay as they are for linear_blocks.

Elsewhere (CUDA, AMX, int8 activations) Q4_0, Q4_1 and Q4_K become int4 with groups of 32, others dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._blocks import KINDS as ALL
from ..ops._blocks import OWN, ggml, scale_at
from .experts import ExpertsFormat
from .order import Order
from .weight import (
    Dim,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    TensorInfo,
    dense_weight,
    not_finite,
    pack_nibbles,
    rows_in,
)

KINDS = {kind.name.upper(): kind for kind in ALL.values() if kind.number < OWN}  # by GGUF's names
_INT4 = {"Q4_0": ggml.q4_0, "Q4_1": ggml.q4_1, "Q4_K": ggml.q4_k}


@dataclass(frozen=True)
class Blocks(StoredFormat):
    """A weight in blocks along its rows; the one tensor is called "weight", [n, bytes of a row] uint8.

    Attributes:
        kind: A key of KINDS.
        rows: The order of its rows; None: the model's.
        columns: The order of its columns; None: the model's.
        parts: The rows of each tensor, if it is stored as several, whose rows follow each other, by name.
    """

    kind: str
    rows: Order | None = None
    columns: Order | None = None
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return f"gguf {self.kind}"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, row = shapes[self.parts[0][0] if self.parts else "weight"]
        n = sum(count for _, count in self.parts) or n
        return n, row // KINDS[self.kind].bytes * KINDS[self.kind].elements

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        kind = KINDS[self.kind]
        if k % kind.elements:
            raise ValueError(f"in_features must be a multiple of {kind.elements}, the elements of a block, got {k}")
        width = k // kind.elements * kind.bytes
        row = (
            Dim(width, "columns", kind.elements, kind.bytes)
            if self.columns is None
            else Dim(width, "columns", k, width)
        )
        if self.parts:
            parts = {name: Dim(count, "rows", n, count) for name, count in self.parts}
            return {name: Expected(((rows, row),), (torch.uint8,)) for name, rows in parts.items()}
        rows = rows_in(n)
        if self.rows is not None:
            unit = self.rows.unit(n)
            rows = Dim(n, "rows", unit, unit)
        return {"weight": Expected(((rows, row),), (torch.uint8,))}

    def checked_tensors(self) -> tuple[str, ...]:
        return ()  # scales are in the blocks: _blocks checks them

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return None

    def _blocks(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return [rows, blocks, bytes], the columns in the file's order; ValueError for scales that are not finite."""
        kind = KINDS[self.kind]
        weight = torch.cat([tensors[name] for name, _ in self.parts]) if self.parts else tensors["weight"]
        weight = weight[rows if self.rows is None else self.rows.index(len(weight))[rows]]
        blocks = weight.unflatten(1, (-1, kind.bytes))
        for at in kind.scales:
            if fault := not_finite("scales", scale_at(blocks, at)):
                raise ValueError(f"the {fault[0]} must {fault[1]}, got {fault[2]} (row, block)")
        return blocks

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        values = KINDS[self.kind].values(self._blocks(tensors, rows)).flatten(1)
        return values if self.columns is None else values[:, self.columns.index(k)]

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        groups = _INT4.get(self.kind)
        columns = None if self.columns is None else self.columns.index(k).argsort()
        if target.takes_blocks if groups is None else target.prefers_blocks:
            blocks = self._blocks(tensors, slice(None))
            elements = KINDS[self.kind].elements
            if self.columns is not None and self.columns.size % elements == 0 == self.columns.first % elements:
                pieces = Order(
                    self.columns.outer,
                    self.columns.inner,
                    self.columns.size // elements,
                    self.columns.first // elements,
                )
                blocks, columns = blocks[:, pieces.index(blocks.shape[1])], None
            return LinearWeight(self.kind.lower(), blocks, columns=columns)
        if groups is None:
            return dense_weight(self, tensors, n, k, target.dtype)
        packed, scales = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 32)
        zeros = None if self.kind == "Q4_0" else torch.empty(n, k // 32)
        step = max((1 << 20) // max(k, 1), 1)
        for first in range(0, n, step):
            rows = slice(first, first + step)
            q, scale, minimum = groups(self._blocks(tensors, rows))
            packed[rows] = pack_nibbles(q.flatten(1))
            scales[rows] = scale.flatten(1)
            if zeros is not None:
                zeros[rows] = (8 * scale - minimum).flatten(1)
        if zeros is None and target.dtype == torch.float16:
            scales = scales.half()  # as they are in the file
        return LinearWeight("int4", packed, scales, zeros, columns)


class BlocksOfExperts(ExpertsFormat):
    """Experts in blocks along their rows, [experts, rows, bytes of a row] uint8: gate and up are parts of one weight.

    Args:
        kind: A key of KINDS.
        parts: The parts' names.
        interleaved: Whether rows of the parts alternate; else one part follows the other.
        transposed: As ExpertsFormat's.
    """

    def __init__(self, kind: str, parts: tuple[str, ...], interleaved: bool, transposed: bool) -> None:
        self.name, self.kind, self.parts, self.transposed = f"gguf {kind}", kind.lower(), parts, transposed
        self._kind, self._interleaved = KINDS[kind], interleaved

    def size(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int, int] | None:
        shape = infos[self.parts[0]].shape
        if len(shape) != 3:
            return None
        return shape[0], len(self.parts) * shape[1], shape[2] // self._kind.bytes * self._kind.elements

    def expected(self, experts: int, n: int, k: int) -> dict[str, TensorInfo]:
        shape = experts, n // len(self.parts), k // self._kind.elements * self._kind.bytes
        return dict.fromkeys(self.parts, TensorInfo(torch.uint8, shape))

    def check(self, tensors: Mapping[str, Tensor]) -> tuple[str, str, str] | None:
        return None  # scales are in the blocks: `blocks` checks them

    def blocks(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [tensors[part].unflatten(2, (-1, self._kind.bytes)) for part in self.parts]
        experts, rows, count, size = parts[0].shape
        blocks = torch.empty(experts, len(parts) * rows, count, size, dtype=torch.uint8)
        for i, part in enumerate(parts):
            to = blocks[:, i :: len(parts)] if self._interleaved else blocks[:, i * rows : (i + 1) * rows]
            for own, stored in zip(to, part, strict=True):
                own.copy_(stored)
                for at in self._kind.scales:
                    if fault := not_finite("scales", scale_at(own, at, self._kind.scale_dtype)):
                        raise ValueError(f"the {fault[0]} must {fault[1]}, got {fault[2]} (row, block)")
        return blocks
