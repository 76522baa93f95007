"""Weights in panels: linear_table4, linear_group8 and their quantizing ops, computed in plain torch.

csrc/infiniop/panel_weights/panel_weights.h describes the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL, BLOCK, GROUP = 16, 64, 16  # rows per panel; columns per block and per scale
GROUPS = BLOCK // GROUP  # per block
TABLE = (-64, -52, -42, -32, -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57)
PLACES = (-48, -52, -56, -60, -64, -68, -72, -76, 44, 48, 52, 56, 60, 64, 68)

# The stored elements [n, k] uint8; the groups' scales [n, groups] int8; the rows' scales [n].
Quantized = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Panels:
    """A format: bits per element, columns of x per scale, the element used as padding, and how to quantize."""

    bits: int
    run: int
    beyond: int
    quantize: Callable[[Tensor], Quantized]

    @property
    def block_bytes(self) -> int:
        return GROUPS * PANEL + PANEL * BLOCK * self.bits // 8

    @property
    def _parts(self) -> tuple[tuple[int, tuple[int, int, int]], ...]:
        """Return where a block's scales and lines begin, and their shapes: [.., rows, bytes per row]."""
        return (0, (GROUPS, PANEL, 1)), (GROUPS * PANEL, (BLOCK * self.bits // 32, PANEL, 4))

    def packed_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Return the shape of a packed weight with n rows of k elements."""
        return -(-n // PANEL), -(-k // BLOCK), self.block_bytes

    def _views(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales [panels, blocks, GROUPS, PANEL, 1] and the lines [panels, blocks, lines, PANEL, 4]."""
        scales, lines = (
            packed[..., begin : begin + shape[0] * shape[1] * shape[2]].view(*packed.shape[:2], *shape)
            for begin, shape in self._parts
        )
        return scales, lines

    def put_rows(self, packed: Tensor, row: Tensor, elements: Tensor, group_scales: Tensor) -> None:
        """Write rows into a packed weight, padded with `beyond` and scale 0."""
        n, blocks = elements.shape[0], packed.shape[1]
        full = torch.full((n, blocks * BLOCK), self.beyond, dtype=torch.uint8)
        full[:, : elements.shape[1]] = elements
        scales = torch.zeros(n, blocks * GROUPS, dtype=torch.int8)
        scales[:, : group_scales.shape[1]] = group_scales
        fours = full.view(n, blocks, BLOCK // 4, 4)
        if self.bits == 4:
            fours = fours[:, :, ::2] | fours[:, :, 1::2] << 4
        to_scales, to_lines = self._views(packed)
        panel, lane = row // PANEL, row % PANEL
        to_lines[panel, :, :, lane] = fours
        to_scales[panel, :, :, lane, 0] = scales.view(torch.uint8).view(n, blocks, GROUPS)

    def copy_rows(self, some: Tensor, first: int, packed: Tensor, row: int, rows: int) -> None:
        """Copy `rows` rows of a packed weight, from `first` on, to another's rows from `row` on."""
        whole = 0 if first % PANEL or row % PANEL else rows // PANEL
        packed[row // PANEL :][:whole].copy_(some[first // PANEL :][:whole])
        left = torch.arange(whole * PANEL, rows)
        (panel, lane), (panel_to, lane_to) = (((left + at) // PANEL, (left + at) % PANEL) for at in (first, row))
        for of, to in zip(self._views(some), self._views(packed), strict=True):
            to[panel_to, :, :, lane_to] = of[panel, :, :, lane].to(to.device)

    def integers(self, packed: Tensor, n: int, k: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return [n, k]: the groups' scales times the elements, which float32 holds exactly."""
        panels, blocks = packed.shape[:2]
        scales, lines = self._views(packed)
        if self.bits == 4:
            table = torch.tensor(TABLE, dtype=dtype, device=packed.device)
            elements = table[torch.stack((lines & 15, lines >> 4), 3).flatten(2, 3).int()]
        else:
            elements = lines.view(torch.int8).to(dtype)
        elements = elements.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, blocks * BLOCK)
        of_groups = scales[..., 0].view(torch.int8).permute(0, 3, 1, 2).reshape(panels * PANEL, blocks * GROUPS)
        return (elements.unflatten(1, (-1, GROUP)) * of_groups.to(dtype)[..., None]).flatten(1)[:n, :k]

    def dequantize(self, packed: Tensor, scales: Tensor, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [n, k], computed in float32."""
        return (self.integers(packed, scales.shape[0], k, torch.float32) * scales[:, None]).to(dtype)

    def quantize_x(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize x [..., k] to int64 [..., runs, run], padded with zeros, with float32 scales [..., runs]."""
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % self.run))
        runs = padded.view(*x.shape[:-1], padded.shape[-1] // self.run, self.run)
        finite = runs.isfinite().all(-1)
        runs = runs.where(finite[..., None], 0)
        scales = runs.abs().amax(-1) / 127
        q = (runs / torch.where(scales > 0, scales, 1.0)[..., None]).round().clamp(-127, 127)
        return q.long(), scales.where(finite, torch.nan)

    def quantized_x(self, x: Tensor) -> Tensor:
        """Return x with its quantization error: each run as int8 times its scale, in float32."""
        q, scales = self.quantize_x(x)
        return (q * scales[..., None]).flatten(-2)[..., : x.shape[-1]]


def _groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the groups [n, groups, GROUP] of a weight [n, k] in float32, and which rows are finite; others are 0."""
    finite = weight.isfinite().all(1)
    rows = torch.nn.functional.pad(weight.float().where(finite[:, None], 0), (0, -weight.shape[1] % GROUP))
    return rows.view(rows.shape[0], rows.shape[1] // GROUP, GROUP), finite


def _steps(fitted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' scales, and each group's scale as a multiple of its row's."""
    scales = fitted.abs().amax(1) / 127 if fitted.shape[1] else fitted.new_zeros(fitted.shape[0])
    return scales, (fitted / torch.where(scales > 0, scales, 1.0)[:, None]).clamp(-127, 127)


def _by_groups(groups: Tensor, steps: Tensor, scales: Tensor) -> Tensor:
    step = steps * scales[:, None]
    return groups / torch.where(step == 0, 1.0, step)[..., None]


def _indices(values: Tensor) -> Tensor:
    table = torch.tensor(TABLE, dtype=torch.float32)
    # Midpoints go to the upper level, NaN to the first.
    return torch.bucketize(values.nan_to_num(-1e30), (table[1:] + table[:-1]) / 2, right=True)


def _fit(groups: Tensor) -> Tensor:
    """Return the scale of each group, [..., GROUP] -> [...]. Sums run over a group's elements in order."""
    table = torch.tensor(TABLE, dtype=torch.float32)
    place = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, place).squeeze(-1)
    parts = groups / torch.where(largest == 0, 1.0, largest)[..., None]
    best, scale = torch.full_like(largest, -1), torch.zeros_like(largest)
    for where in PLACES:
        levels = table[_indices(parts * where)]
        products, squares = torch.zeros_like(largest), torch.zeros_like(largest)
        for i in range(GROUP):
            products += levels[..., i] * parts[..., i]
            squares += levels[..., i] * levels[..., i]
        gain = products * products / squares
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, products / squares, scale)
    return scale * largest


def _quantize_table4(weight: Tensor) -> Quantized:
    groups, finite = _groups(weight)
    scales, quotients = _steps(_fit(groups) if groups.numel() else groups.new_zeros(groups.shape[:2]))
    steps = quotients.round()
    indices = _indices(_by_groups(groups, steps, scales)).to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return indices.where(finite[:, None], 0), steps.to(torch.int8), scales.where(finite, torch.nan)


def _quantize_group8(weight: Tensor) -> Quantized:
    groups, finite = _groups(weight)
    scales, quotients = _steps(groups.abs().amax(2) / 127)
    steps = quotients.round()
    steps = (steps + (steps < quotients)).clamp(max=127)
    integers = _by_groups(groups, steps, scales).clamp(-127, 127).round().to(torch.int8)
    integers = integers.flatten(1)[:, : weight.shape[1]]
    return integers.view(torch.uint8), steps.to(torch.int8), scales.where(finite, torch.nan)


TABLE4 = Panels(4, 128, 8, _quantize_table4)  # index 8: the level nearest to 0
GROUP8 = Panels(8, 64, 0, _quantize_group8)
