"""What linear_table4 and quantize_table4 compute, in plain torch: the table, the layout, both ways, quantized x.

csrc/infiniop/linear_table4/linear_table4.h describes the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

TABLE = (-64, -52, -42, -32, -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57)
PANEL, BLOCK, GROUP, RUN = 16, 64, 16, 128  # rows that lie together; columns of a block, of a scale of w, of one of x
GROUPS, LINES = BLOCK // GROUP, BLOCK // 8  # of a block
BLOCK_BYTES = GROUPS * PANEL + PANEL * BLOCK // 2
PLACES = (-48, -52, -56, -60, -64, -68, -72, -76, 44, 48, 52, 56, 60, 64, 68)


def packed_shape(n: int, k: int) -> tuple[int, int, int]:
    """The shape of a packed weight with n rows of k elements."""
    return -(-n // PANEL), -(-k // BLOCK), BLOCK_BYTES


def _indices(values: Tensor) -> Tensor:
    table = torch.tensor(TABLE, dtype=torch.float32)
    # From a midpoint on the upper level, and the first one for NaN.
    return torch.bucketize(values.nan_to_num(-1e30), (table[1:] + table[:-1]) / 2, right=True)


def _fit(groups: Tensor) -> Tensor:
    """[..., GROUP] -> [...]: the scale of each group; sums run over its elements in their order."""
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


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The indices [n, k] uint8, the groups' scales [n, groups] int8 and the rows' [n] float32 of a weight [n, k]."""
    n, k = weight.shape
    finite = weight.isfinite().all(1)
    rows = torch.nn.functional.pad(weight.float().where(finite[:, None], 0), (0, -k % GROUP))
    groups = rows.view(n, rows.shape[1] // GROUP, GROUP)
    fitted = _fit(groups) if groups.numel() else groups.new_zeros(groups.shape[:2])
    scales = fitted.abs().amax(1) / 127 if fitted.shape[1] else fitted.new_zeros(n)
    steps = (fitted / torch.where(scales > 0, scales, 1.0)[:, None]).clamp(-127, 127).round()
    step = steps * scales[:, None]
    indices = _indices(groups / torch.where(step == 0, 1.0, step)[..., None]).to(torch.uint8)
    indices = indices.view(rows.shape)[:, :k].where(finite[:, None], 0)
    return indices, steps.to(torch.int8), scales.where(finite, torch.nan)


def put_rows(packed: Tensor, row: Tensor, indices: Tensor, group_scales: Tensor) -> None:
    """Write rows into a packed weight; index 8 and scale 0 beyond their ends."""
    n, blocks = indices.shape[0], packed.shape[1]
    full = torch.full((n, blocks * BLOCK), 8, dtype=torch.uint8)
    full[:, : indices.shape[1]] = indices
    scales = torch.zeros(n, blocks * GROUPS, dtype=torch.int8)
    scales[:, : group_scales.shape[1]] = group_scales
    low, high = full.view(n, blocks, LINES, 2, 4).unbind(3)
    panel, lane = row // PANEL, row % PANEL
    lines = packed[..., GROUPS * PANEL :].view(packed.shape[0], blocks, LINES, PANEL, 4)
    lines[panel, :, :, lane] = low | high << 4
    packed[..., : GROUPS * PANEL].view(packed.shape[0], blocks, GROUPS, PANEL)[panel, :, :, lane] = scales.view(
        torch.uint8
    ).view(n, blocks, GROUPS)


def copy_rows(some: Tensor, first: int, packed: Tensor, row: int, rows: int) -> None:
    """Copy rows of a packed weight, from `first` on, to those of another one from `row` on; the others stay."""
    whole = 0 if first % PANEL or row % PANEL else rows // PANEL
    packed[row // PANEL :][:whole].copy_(some[first // PANEL :][:whole])
    left = torch.arange(whole * PANEL, rows)
    (panel, lane), (panel_to, lane_to) = (((left + at) // PANEL, (left + at) % PANEL) for at in (first, row))
    for begin, shape in ((0, (GROUPS, PANEL, 1)), (GROUPS * PANEL, (LINES, PANEL, 4))):
        part = slice(begin, begin + shape[0] * shape[1] * shape[2])
        to = packed[..., part].view(*packed.shape[:2], *shape)
        to[panel_to, :, :, lane_to] = some[..., part].view(*some.shape[:2], *shape)[panel, :, :, lane]


def integers(packed: Tensor, n: int, k: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """[n, k]: the groups' scales times the table's levels; float32 holds them exactly."""
    panels, blocks = packed.shape[:2]
    lines = packed[..., GROUPS * PANEL :].view(panels, blocks, LINES, PANEL, 4)
    indices = torch.stack((lines & 15, lines >> 4), 3)  # [panels, blocks, LINES, 2, PANEL, 4]
    indices = indices.permute(0, 4, 1, 2, 3, 5).reshape(panels * PANEL, blocks * BLOCK)
    scales = packed[..., : GROUPS * PANEL].view(torch.int8).view(panels, blocks, GROUPS, PANEL)
    scales = scales.permute(0, 3, 1, 2).reshape(panels * PANEL, blocks * GROUPS)
    levels = torch.tensor(TABLE, dtype=dtype, device=packed.device)[indices.int()]
    return (levels.unflatten(1, (-1, GROUP)) * scales.to(dtype)[..., None]).flatten(1)[:n, :k]


def dequantize(packed: Tensor, scales: Tensor, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, k]: the weight, computed in float32."""
    return (integers(packed, scales.shape[0], k, torch.float32) * scales[:, None]).to(dtype)


def quantize_x(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., k] -> int64 [..., runs, RUN], with zeros beyond k, and float32 scales [..., runs]."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % RUN))
    runs = padded.view(*x.shape[:-1], padded.shape[-1] // RUN, RUN)
    finite = runs.isfinite().all(-1)
    runs = runs.where(finite[..., None], 0)
    scales = runs.abs().amax(-1) / 127
    q = (runs / torch.where(scales > 0, scales, 1.0)[..., None]).round().clamp(-127, 127)
    return q.long(), scales.where(finite, torch.nan)


def quantized_x(x: Tensor) -> Tensor:
    """x as linear_table4 multiplies it: each run of 128 columns as int8 times a scale, float32."""
    q, scales = quantize_x(x)
    return (q * scales[..., None]).flatten(-2)[..., : x.shape[-1]]
