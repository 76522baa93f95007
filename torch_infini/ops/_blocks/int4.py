"""4-bit codes in groups of 32, 64 and 128, in blocks of our own: a float16 scale and zero point, then the codes.

Checkpoints of AWQ, GPTQ and their like store the three apart; `int4_blocks` brings them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kind import BlockKind, scale_at

_HALVES = {32: 16, 64: 32, 128: 32}  # by group: the elements in the lower nibbles of their bytes


def _values(blocks: Tensor) -> Tensor:
    half = _HALVES[2 * (blocks.shape[-1] - 4)]
    codes = blocks[..., 4:].unflatten(-1, (-1, half))
    q = torch.cat((codes & 15, codes >> 4), -1).flatten(-2).double()
    scale, zero = (scale_at(blocks, at)[..., None] for at in (0, 2))
    return (q - zero) * scale


def int4_blocks(codes: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """Return the blocks of a weight.

    Args:
        codes: [n, k] uint8, from 0 to 15.
        scales, zero_points: [n, k / group] float16: a value is (code - zero point) * scale.

    Returns:
        [n, k / group, 4 + group / 2] uint8.
    """
    n, groups = scales.shape
    group = codes.shape[1] // groups
    blocks = torch.empty(n, groups, 4 + group // 2, dtype=torch.uint8)
    blocks[..., :2], blocks[..., 2:4] = (x.contiguous()[..., None].view(torch.uint8) for x in (scales, zero_points))
    low, high = codes.unflatten(1, (groups, -1, 2, _HALVES[group])).unbind(3)
    blocks[..., 4:] = (low | high << 4).flatten(2)
    return blocks


KINDS = tuple(
    BlockKind(f"int4_{group}", number, group, 4 + group // 2, _values, (0, 2))
    for group, number in ((32, 1002), (64, 1003), (128, 1004))
)
