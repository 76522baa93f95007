"""GGUF's block formats: Q4_0, Q4_1, Q8_0, MXFP4, and Q4_K, Q5_K, Q6_K with super-blocks of 256.

Each function here takes blocks as bytes, [..., bytes of a block]. Q4_0, Q4_1 and Q4_K become int4 with groups of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .formats.mxfp4 import fp4, power_of_two
from .weight import Dim, Expected, LinearWeight, StoredFormat, dense_weight, not_finite, pack_nibbles, rows_in


class Groups(NamedTuple):
    """Blocks as groups: value = q * scale - minimum, with q [..., groups, 32], the others [..., groups] in float64."""

    q: Tensor
    scale: Tensor
    minimum: Tensor

    def values(self) -> Tensor:
        return (self.q.double() * self.scale[..., None] - self.minimum[..., None]).flatten(-2)


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte offset of each block, in float64: [...]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].double()


def two_halves(nibbles: Tensor) -> Tensor:
    """Unpack bytes [..., m] to [..., 2 m]: all lower nibbles, then all upper ones."""
    return torch.cat((nibbles & 15, nibbles >> 4), -1)


def q4_0(blocks: Tensor) -> Groups:
    scale = half(blocks, 0)[..., None]
    return Groups(two_halves(blocks[..., 2:18])[..., None, :], scale, 8 * scale)


def q4_1(blocks: Tensor) -> Groups:
    return Groups(two_halves(blocks[..., 4:20])[..., None, :], half(blocks, 0)[..., None], -half(blocks, 2)[..., None])


def q8_0(blocks: Tensor) -> Groups:
    scale = half(blocks, 0)[..., None]
    return Groups(blocks[..., 2:34].contiguous().view(torch.int8)[..., None, :], scale, torch.zeros_like(scale))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of the eight sub-blocks of Q4_K and Q5_K: 6 bits each in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return half(blocks, 0)[..., None] * scales.double(), half(blocks, 2)[..., None] * minima.double()


def q4_k(blocks: Tensor) -> Groups:
    q = blocks[..., 16:144].unflatten(-1, (4, 32))
    return Groups(torch.stack((q & 15, q >> 4), -2).flatten(-3, -2), *_scales_of_k(blocks))


def q5_k(blocks: Tensor) -> Groups:
    q, high = blocks[..., 48:176].unflatten(-1, (4, 32)), blocks[..., 16:48]
    bits = torch.stack([high >> i & 1 for i in range(8)], -2)
    return Groups(torch.stack((q & 15, q >> 4), -2).flatten(-3, -2) + 16 * bits, *_scales_of_k(blocks))


def q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 32))
    nibbles = torch.cat((low & 15, low >> 4), -2)  # [..., 2, 4, 32]
    bits = torch.stack([high >> 2 * i & 3 for i in range(4)], -2)
    q = (nibbles | bits << 4).flatten(-3).unflatten(-1, (16, 16)).double() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).double()
    return (q * (half(blocks, 208)[..., None] * scales)[..., None]).flatten(-2)


def mxfp4(blocks: Tensor) -> Tensor:
    return fp4(two_halves(blocks[..., 1:17])) * power_of_two(blocks[..., :1])


def interleaved(n: int, head: int) -> Tensor:
    """Return the index of each of n rows in a file whose heads of `head` rows have rows 0, half, 1, half + 1 ..."""
    return torch.arange(n).unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten()


class BlockFormat(NamedTuple):
    """A block format: elements and bytes of a block, its formula, and the byte offsets of half precision scales."""

    elements: int
    bytes: int
    groups: Callable[[Tensor], Groups] | None  # of four bits or more
    values: Callable[[Tensor], Tensor] | None
    scales: tuple[int, ...]


KINDS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, q4_0, None, (0,)),
    "Q4_1": BlockFormat(32, 20, q4_1, None, (0, 2)),
    "Q8_0": BlockFormat(32, 34, q8_0, None, (0,)),
    "Q4_K": BlockFormat(256, 144, q4_k, None, (0, 2)),
    "Q5_K": BlockFormat(256, 176, q5_k, None, (0, 2)),
    "Q6_K": BlockFormat(256, 210, None, q6_k, (208,)),
    "MXFP4": BlockFormat(32, 17, None, mxfp4, ()),
}
_INT4 = ("Q4_0", "Q4_1", "Q4_K")


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
            if fault := not_finite("scales", half(blocks, at)):
                raise ValueError(f"the {fault[0]} must {fault[1]}, got {fault[2]} (row, block)")
        return blocks

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        kind, rows = KINDS[self.kind], slice(first, n if count < 0 else first + count)
        blocks = self._blocks(tensors, rows)
        if kind.values is not None:
            return kind.values(blocks).flatten(1)
        assert kind.groups is not None
        return kind.groups(blocks).values().flatten(1)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        groups = KINDS[self.kind].groups
        if self.kind not in _INT4 or groups is None:
            return dense_weight(self, tensors, n, k, dtype)
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
        if zeros is None and dtype == torch.float16:
            scales = scales.half()  # as they are in the file
        return LinearWeight("int4", packed, scales, zeros)
