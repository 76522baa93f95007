"""NVFP4 in blocks of our own: a float32 factor, eight scales of E4M3, and the FP4 codes (E2M1) of 128 elements.

Checkpoints store the three apart; the readers of their formats bring them together.

Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ggml import fp4, two_halves
from .kind import BlockKind, scale_at


def nvfp4(blocks: Tensor) -> Tensor:
    scales = blocks[..., 4:12].contiguous().view(torch.float8_e4m3fn).double()
    scales = (scales * scale_at(blocks, 0, torch.float32)[..., None]).float().double()
    q = two_halves(blocks[..., 12:].unflatten(-1, (4, 16))).unflatten(-1, (2, 16)).flatten(-3, -2)
    return (fp4(q) * scales[..., None]).flatten(-2)


KINDS = (BlockKind("nvfp4", 1005, 128, 76, nvfp4, (0,), torch.float32),)
