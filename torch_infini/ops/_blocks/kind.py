"""BlockKind: how a run of a weight's elements is stored in a block of bytes, and the formula of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockKind:
    """One kind of block.

    Attributes:
        name: As GGML has it, in lower case; "fp8" and "nf4" are our own.
        number: The argument `kind` of infini::linear_blocks: GGML's number of the type, from 1000 on our own.
        elements: Elements of a block.
        bytes: Bytes of a block.
        values: Takes blocks [..., bytes] uint8, returns their elements [..., elements] in float64.
        scales: The byte offsets of the block's scales, which must be finite.
        scale_dtype: The dtype of these scales.
    """

    name: str
    number: int
    elements: int
    bytes: int
    values: Callable[[Tensor], Tensor]
    scales: tuple[int, ...] = ()
    scale_dtype: torch.dtype = torch.float16

    def dequantize(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [n, k] of a weight [n, k / elements, bytes], rounded once."""
        n, blocks, _ = weight.shape
        return self.values(weight).reshape(n, blocks * self.elements).to(dtype)


def scale_at(blocks: Tensor, at: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return the scale at a byte offset of each block, in float64: [...]."""
    return blocks[..., at : at + dtype.itemsize].contiguous().view(dtype)[..., 0].double()
