"""Where pack_blocks puts the bits of blocks, in plain torch: the layout that linear_block_panels reads.

csrc/infiniop/linear_block_panels/panel_kinds.h describes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ._blocks import KINDS

PANEL, LINE = 16, 64  # rows, and bytes


class Codes(NamedTuple):
    """Where the codes of a kind lie in its block: a block of `elements` codes of `bits` bits each.

    Attributes:
        bits: Of a code: 2 to 6 or 8.
        fields: (first byte, bytes of a number, numbers) of what is no code.
        low: The first of these bytes that have lower bits.
        half: Adjacent bytes: their lowest bits are those of as many elements, the next ones those of the next elements.
        high: The first byte with upper bits.
    """

    bits: int
    fields: tuple[tuple[int, int, int], ...]
    low: int
    half: int
    high: int = 0

    @property
    def low_bits(self) -> int:
        return 8 if self.bits == 8 else 4 if self.bits >= 4 else 2

    @property
    def columns(self) -> int:
        """Of the lines that belong together."""
        return 32 // (self.bits - self.low_bits or self.low_bits)


_HALF, _HALVES = ((0, 2, 1),), ((0, 2, 1), (2, 2, 1))
CODES = {
    "q4_0": Codes(4, _HALF, 2, 16),
    "q4_1": Codes(4, _HALVES, 4, 16),
    "q5_0": Codes(5, _HALF, 6, 16, 2),
    "q5_1": Codes(5, _HALVES, 8, 16, 4),
    "q8_0": Codes(8, _HALF, 2, 32),
    "q4_k": Codes(4, (*_HALVES, (4, 4, 3)), 16, 32),
    "q5_k": Codes(5, (*_HALVES, (4, 4, 3)), 48, 32, 16),
    "q6_k": Codes(6, ((208, 2, 1), (192, 1, 16)), 0, 64, 128),
    "q2_k": Codes(2, ((80, 2, 1), (82, 2, 1), (0, 1, 16)), 16, 32),
    "q3_k": Codes(3, ((108, 2, 1), (96, 4, 3)), 32, 32),
    "iq4_nl": Codes(4, _HALF, 2, 16),
    "iq4_xs": Codes(4, (*_HALVES, (4, 4, 1)), 8, 16),
    "mxfp4": Codes(4, ((0, 1, 1),), 1, 16),
    "nvfp4": Codes(4, ((0, 4, 1), (4, 1, 8)), 12, 16),
    "int4_32": Codes(4, _HALVES, 4, 16),
    "int4_64": Codes(4, _HALVES, 4, 32),
    "int4_128": Codes(4, _HALVES, 4, 32),
}
NUMBERS = {KINDS[name].number: name for name in CODES}


def packed_shape(kind: int, n: int, k: int) -> tuple[int, int, int]:
    """Return the shape of n rows of k elements in panels."""
    of = KINDS[NUMBERS[kind]]
    return -(-n // PANEL), k // of.elements, PANEL * of.bytes


def _bit(name: str, e: int, bit: int) -> int:
    """Return the bit of the block that is bit `bit` of the code of element e."""
    of = CODES[name]
    if of.bits == 8:
        return 8 * (of.low + e) + bit
    run, i = divmod(e, 8 // of.low_bits * of.half)
    if bit < of.low_bits:
        return 8 * (of.low + run * of.half + i % of.half) + of.low_bits * (i // of.half) + bit
    if of.bits == 6:  # of each 128 elements, 32 bytes have the upper two bits of each quarter
        quarter, at = divmod(i, 32)
        return 8 * (of.high + 32 * run + at) + 2 * quarter + bit - 4
    if of.half == 16:
        return 8 * of.high + e
    return 8 * (of.high + e % 32) + e // 32


@lru_cache
def _places(name: str) -> tuple[Tensor, Tensor]:
    """Return (rows, bits): bit i of the lines of a block's panel is bit bits[i] of the block of row rows[i]."""
    of, elements = CODES[name], KINDS[name].elements
    low = of.low_bits

    def line(column: int, first_bit: int, width: int) -> list[tuple[int, int, int]]:
        return [
            (word // 2, column + 2 * pair + word % 2, first_bit + bit)
            for word in range(2 * PANEL)
            for pair in range(16 // width)
            for bit in range(width)
        ]

    rows, bits = [], []
    for first in range(0, elements, of.columns):
        if of.bits == 8:
            run = [(row, first + j, bit) for j in range(4) for row in range(PANEL) for bit in range(8)]
        else:
            run = [place for column in range(0, of.columns, 32 // low) for place in line(first + column, 0, low)]
        if of.bits > low:
            run += line(first, low, of.bits - low)
        rows += [row for row, _, _ in run]
        bits += [_bit(name, e, bit) for _, e, bit in run]
    return torch.tensor(rows), torch.tensor(bits)


def _header(name: str) -> list[tuple[int, int]]:
    """Return (first byte, bytes) of each number of a block's header, in the order of a panel's."""
    return [(at + i * size, size) for at, size, count in CODES[name].fields for i in range(count)]


def _units(packed: Tensor, name: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (blocks, headers, lines) of each unit: views [panels, blocks, bytes]."""
    panels, blocks, size = packed.shape
    header = PANEL * sum(size for _, size in _header(name))
    step = max(LINE // header, 1)
    for first in range(0, blocks, step):
        some = slice(first, min(first + step, blocks))
        unit = packed.view(panels, -1)[:, size * some.start : size * some.stop]
        cut = header * (some.stop - some.start)
        yield some, unit[:, :cut].unflatten(1, (-1, header)), unit[:, cut:].unflatten(1, (-1, size - header))


def _bits(values: Tensor) -> Tensor:
    """Return the bits of bytes [..., n]: [..., 8 n]."""
    return (values[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _bytes(bits: Tensor) -> Tensor:
    return (bits.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)


def blocks_of(packed: Tensor, kind: int) -> Tensor:
    """Return the rows of panels in blocks: [16 * panels, blocks, bytes]."""
    name = NUMBERS[kind]
    panels, blocks, _ = packed.shape
    if not packed.numel():
        return packed.new_empty(PANEL * panels, blocks, KINDS[name].bytes)
    row, bit = _places(name)
    found = packed.new_empty(panels, PANEL, blocks, KINDS[name].bytes)
    for some, headers, lines in _units(packed, name):
        bits = torch.zeros(panels, PANEL, lines.shape[1], 8 * KINDS[name].bytes, dtype=torch.uint8)
        bits[:, row, :, bit] = _bits(lines).permute(2, 0, 1)
        found[:, :, some] = _bytes(bits)
        first = 0
        for at, size in _header(name):
            number = headers[:, :, first : first + PANEL * size].unflatten(-1, (PANEL, size))
            found[:, :, some, at : at + size] = number.transpose(1, 2)
            first += PANEL * size
    return found.flatten(0, 1)


def put_blocks(packed: Tensor, weight: Tensor, kind: int, first_row: int = 0) -> None:
    """Pack rows as the op pack_blocks does."""
    name, rows = NUMBERS[kind], len(weight)
    if not weight.numel():
        return
    whole = blocks_of(packed, kind)
    whole[first_row : first_row + rows] = weight
    panels = whole.unflatten(0, (-1, PANEL))
    row, bit = _places(name)
    for some, headers, lines in _units(packed, name):
        part = panels[:, :, some]
        lines.copy_(_bytes(_bits(part)[:, row, :, bit].permute(1, 2, 0)))
        first = 0
        for at, size in _header(name):
            headers[:, :, first : first + PANEL * size] = part[..., at : at + size].transpose(1, 2).flatten(-2)
            first += PANEL * size
