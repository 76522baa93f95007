"""GGML's kinds of 256 elements with 2 or 3 bits, and with 4 bits that are indices into a table: Q2_K, Q3_K, IQ4_XS.

Each function here takes blocks as bytes, [..., bytes of a block].

Source: llama.cpp's pull requests that introduced the types, #1684 for the K-quants and #5747 for IQ4_XS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ggml import IQ4_NL, half, two_halves
from .kind import BlockKind


def _two_bits(q: Tensor) -> Tensor:
    """Unpack bytes [..., 64] to [..., 256]: each 32 of them are 128 elements, by their lowest bits first."""
    parts = q.unflatten(-1, (2, 32))
    return torch.stack([parts >> 2 * i & 3 for i in range(4)], -2).flatten(-3)


def q2_k(blocks: Tensor) -> Tensor:
    q = _two_bits(blocks[..., 16:80]).unflatten(-1, (16, 16)).double()
    scales = half(blocks, 80)[..., None] * (blocks[..., :16] & 15)
    minima = half(blocks, 82)[..., None] * (blocks[..., :16] >> 4)
    return (q * scales[..., None] - minima[..., None]).flatten(-2)


def q3_k(blocks: Tensor) -> Tensor:
    third = torch.stack([blocks[..., :32] >> i & 1 for i in range(8)], -2).flatten(-2)
    q = (_two_bits(blocks[..., 32:96]) | third << 2).unflatten(-1, (16, 16)).double() - 4
    low, upper = blocks[..., 96:104], blocks[..., 104:108]
    four = torch.cat((low & 15, low >> 4), -1)
    two = torch.cat([upper >> 2 * i & 3 for i in range(4)], -1)
    scales = half(blocks, 108)[..., None] * ((four | two << 4).double() - 32)
    return (q * scales[..., None]).flatten(-2)


def iq4_xs(blocks: Tensor) -> Tensor:
    levels = torch.tensor(IQ4_NL, dtype=torch.float64)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    upper = torch.cat([blocks[..., 2 + i : 3 + i] >> 2 * j & 3 for i in range(2) for j in range(4)], -1)
    scales = half(blocks, 0)[..., None] * ((low | upper << 4).double() - 32)
    q = two_halves(blocks[..., 8:136].unflatten(-1, (8, 16)))
    return (levels[q.long()] * scales[..., None]).flatten(-2)


KINDS = (
    BlockKind("q2_k", 10, 256, 84, q2_k, (80, 82)),
    BlockKind("q3_k", 11, 256, 110, q3_k, (108,)),
    BlockKind("iq4_xs", 23, 256, 136, iq4_xs, (0,)),
)
