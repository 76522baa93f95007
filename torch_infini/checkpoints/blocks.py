"""GGUF's block formats, whose formulas are in ops/_blocks. Blocks stay as they are for linear_blocks.

Elsewhere (CUDA, AMX, int8 activations) Q4_0, Q4_1 and Q4_K become int4 with groups of 32, others dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._blocks import ggml, scale_at
from .experts import ExpertsFormat
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

KINDS = {kind.name.upper(): kind for kind in ggml.KINDS}  # by GGUF's names
_INT4 = {"Q4_0": ggml.q4_0, "Q4_1": ggml.q4_1, "Q4_K": ggml.q4_k}


def interleaved(n: int, head: int) -> Tensor:
    """Return the index of each of n rows in a file whose heads of `head` rows have rows 0, half, 1, half + 1 ..."""
    return torch.arange(n).unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten()


@dataclass(frozen=True)
class Blocks(StoredFormat):
    """A weight in blocks along its rows; the one tensor is called "weight", [n, bytes of a row] uint8.

    Attributes:
        kind: A key of KINDS.
        head: Rows of a head, if the file has them interleaved (see `interleaved`); else 0.
    """

    kind: str
    head: int = 0

    @property
    def name(self) -> str:
        return f"gguf {self.kind}"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, row = shapes["weight"]
        return n, row // KINDS[self.kind].bytes * KINDS[self.kind].elements

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        kind = KINDS[self.kind]
        if k % kind.elements:
            raise ValueError(f"in_features must be a multiple of {kind.elements}, the elements of a block, got {k}")
        row = Dim(k // kind.elements * kind.bytes, "columns", kind.elements, kind.bytes)
        rows = Dim(n, "rows", self.head, self.head) if self.head else rows_in(n)
        return {"weight": Expected(((rows, row),), (torch.uint8,))}

    def checked_tensors(self) -> tuple[str, ...]:
        return ()  # scales are in the blocks: _blocks checks them

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return None

    def _blocks(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Return [rows, blocks, bytes]; ValueError for scales that are not finite."""
        kind = KINDS[self.kind]
        weight = tensors["weight"]
        weight = weight[interleaved(len(weight), self.head)[rows] if self.head else rows]
        blocks = weight.unflatten(1, (-1, kind.bytes))
        for at in kind.scales:
            if fault := not_finite("scales", scale_at(blocks, at)):
                raise ValueError(f"the {fault[0]} must {fault[1]}, got {fault[2]} (row, block)")
        return blocks

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        return KINDS[self.kind].values(self._blocks(tensors, rows)).flatten(1)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        groups = _INT4.get(self.kind)
        if target.takes_blocks if groups is None else target.prefers_blocks:
            return LinearWeight(self.kind.lower(), self._blocks(tensors, slice(None)))
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
        return LinearWeight("int4", packed, scales, zeros)


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
