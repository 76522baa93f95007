"""GGML's kinds of blocks, as GGUF files have them: legacy ones of 32 elements, and K-quants of 256.

Each function here takes blocks as bytes, [..., bytes of a block].

Source: llama.cpp's pull requests that introduced the types, #1684 for the K-quants; MXFP4: OCP Microscaling Formats
    (MX) Specification 1.0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kind import BlockKind, scale_at

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 by exponent and mantissa; the fourth bit is the sign
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Groups(NamedTuple):
    """Blocks as groups: value = q * scale - minimum, with q [..., groups, 32], the others [..., groups] in float64."""

    q: Tensor
    scale: Tensor
    minimum: Tensor

    def values(self) -> Tensor:
        return (self.q.double() * self.scale[..., None] - self.minimum[..., None]).flatten(-2)


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte offset of each block, in float64: [...]."""
    return scale_at(blocks, at)


def two_halves(nibbles: Tensor) -> Tensor:
    """Unpack bytes [..., m] to [..., 2 m]: all lower nibbles, then all upper ones."""
    return torch.cat((nibbles & 15, nibbles >> 4), -1)


def fp4(codes: Tensor) -> Tensor:
    """Return the values of FP4 (E2M1) codes from 0 to 15, in float64."""
    return torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.float64)[codes.long()]


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (e - 127) of E8M0 exponents, in float64."""
    return (exponents.double() - 127).exp2()  # exact for integers


def q4_0(blocks: Tensor) -> Groups:
    scale = half(blocks, 0)[..., None]
    return Groups(two_halves(blocks[..., 2:18])[..., None, :], scale, 8 * scale)


def q4_1(blocks: Tensor) -> Groups:
    return Groups(two_halves(blocks[..., 4:20])[..., None, :], half(blocks, 0)[..., None], -half(blocks, 2)[..., None])


def _five_bits(nibbles: Tensor, high: Tensor) -> Tensor:
    """Return [..., 1, 32] of nibbles [..., 16] and fifth bits [..., 4], bit i of the 32 for element i."""
    bits = torch.stack([high[..., i // 8] >> i % 8 & 1 for i in range(32)], -1)
    return (two_halves(nibbles) | bits << 4)[..., None, :]


def q5_0(blocks: Tensor) -> Groups:
    scale = half(blocks, 0)[..., None]
    return Groups(_five_bits(blocks[..., 6:22], blocks[..., 2:6]), scale, 16 * scale)


def q5_1(blocks: Tensor) -> Groups:
    q = _five_bits(blocks[..., 8:24], blocks[..., 4:8])
    return Groups(q, half(blocks, 0)[..., None], -half(blocks, 2)[..., None])


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


def iq4_nl(blocks: Tensor) -> Tensor:
    levels = torch.tensor(IQ4_NL, dtype=torch.float64)
    return levels[two_halves(blocks[..., 2:18]).long()] * half(blocks, 0)[..., None]


def mxfp4(blocks: Tensor) -> Tensor:
    return fp4(two_halves(blocks[..., 1:17])) * power_of_two(blocks[..., :1])


KINDS = (
    BlockKind("q4_0", 2, 32, 18, lambda blocks: q4_0(blocks).values(), (0,)),
    BlockKind("q4_1", 3, 32, 20, lambda blocks: q4_1(blocks).values(), (0, 2)),
    BlockKind("q5_0", 6, 32, 22, lambda blocks: q5_0(blocks).values(), (0,)),
    BlockKind("q5_1", 7, 32, 24, lambda blocks: q5_1(blocks).values(), (0, 2)),
    BlockKind("q8_0", 8, 32, 34, lambda blocks: q8_0(blocks).values(), (0,)),
    BlockKind("q4_k", 12, 256, 144, lambda blocks: q4_k(blocks).values(), (0, 2)),
    BlockKind("q5_k", 13, 256, 176, lambda blocks: q5_k(blocks).values(), (0, 2)),
    BlockKind("q6_k", 14, 256, 210, q6_k, (208,)),
    BlockKind("iq4_nl", 20, 32, 18, iq4_nl, (0,)),
    BlockKind("mxfp4", 39, 32, 17, mxfp4),
)
