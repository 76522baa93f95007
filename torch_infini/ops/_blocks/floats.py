"""FP8 and NF4 in blocks of our own: a float32 scale, then the codes that it multiplies.

Checkpoints store the scales apart from the codes; the readers of their formats bring them together.

Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022 (E4M3); Dettmers et al., QLoRA, 2023 (NF4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kind import BlockKind, scale_at

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def fp8(blocks: Tensor) -> Tensor:
    codes = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).double()
    return codes * scale_at(blocks, 0, torch.float32)[..., None]


def nf4(blocks: Tensor) -> Tensor:
    codes = torch.stack((blocks[..., 4:] >> 4, blocks[..., 4:] & 15), -1).flatten(-2)  # the first in the upper half
    levels = torch.tensor(NF4, dtype=torch.float32).double()[codes.long()]
    return levels * scale_at(blocks, 0, torch.float32)[..., None]


KINDS = (
    BlockKind("fp8", 1000, 128, 132, fp8, (0,), torch.float32),
    BlockKind("nf4", 1001, 64, 36, nf4, (0,), torch.float32),
)
