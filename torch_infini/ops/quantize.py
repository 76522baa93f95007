"""quantize_int8 and quantize_int4: weights as the integers and scales that linear_int8 and linear_int4 take.

The kernels are in csrc/infiniop/quantize. torch_infini.weights.quantize wraps them and rejects non-finite weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def quantize_int8(weight: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a weight to int8 with one scale per row, symmetrically.

    scale = max |row| / 127 and q = round(row / scale), from -127 to 127, in float32, ties to even; a row of zeros has
    scale 0. A row that holds infinity or NaN has scale NaN and integers 0.

    Args:
        weight: [n, k] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        out: (q, scales), written and returned; any row stride. They must not share memory with weight or each other.

    Returns:
        (q, scales): [n, k] int8 and [n] float32, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, dtype or stride.

    Equivalent to:
        >>> rows = weight.float()
        >>> scales = rows.abs().amax(1) / 127
        >>> q = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp(-127, 127)
        >>> q, scales = q.to(torch.int8), scales

    Source: Dettmers et al., LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale, 2022, arXiv:2208.07339:
        a scale a row, without the part in float16.
    """
    op = torch.ops.infini.quantize_int8
    return op.default(weight) if out is None else op.out(weight, out0=out[0], out1=out[1])


def quantize_int4(
    weight: Tensor, group_size: int = 64, *, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight to 4 bits with a scale and a zero for each group of group_size elements along a row.

    The range of a group is divided into 15 steps: scale = largest / 15 - least / 15 and zero = least + 8 * scale, both
    rounded to the weight's dtype; q = round((w - zero) / scale) + 8, from 0 to 15, in float32, ties to even; a scale of
    0 divides as 1. A group that holds infinity or NaN has NaN as scale and zero, and integers 0.

    Args:
        weight: [n, k] float32, bfloat16 or float16, k a multiple of group_size; stride 1 in the last dimension, any row
            stride.
        group_size: 32, 64 or 128.
        out: (packed, scales, zeros), written and returned; any row stride. They must not share memory with weight or
            each other.

    Returns:
        (packed, scales, zeros): [n, k / 2] uint8, element 2i of a row in the lower half of byte i; [n, k / group_size]
        and [n, k / group_size], dtype of weight. All contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or group size.

    Equivalent to:
        >>> groups = weight.float().unflatten(1, (-1, group_size))
        >>> least, largest = torch.aminmax(groups, dim=-1)
        >>> scales = (largest / 15 - least / 15).to(weight.dtype)
        >>> zeros = (least + 8 * scales.float()).to(weight.dtype)
        >>> step = torch.where(scales > 0, scales.float(), 1.0)
        >>> q = ((groups - zeros.float()[..., None]) / step[..., None]).round().add(8).clamp(0, 15)
        >>> packed, scales, zeros = torch_infini.weights.pack_int4(q.to(torch.uint8).flatten(1)), scales, zeros

    Source: none needed. Scale and zero have the meaning of torch's `_weight_int4pack_mm`.
    """
    if out is None:
        return torch.ops.infini.quantize_int4.default(weight, group_size)
    return torch.ops.infini.quantize_int4.out(weight, group_size, out0=out[0], out1=out[1], out2=out[2])


def fake_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape, dtype=torch.int8), weight.new_empty(weight.shape[:1], dtype=torch.float32)


def fake_int4(weight: Tensor, group_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    groups = (n, k // group_size)
    return weight.new_empty((n, k // 2), dtype=torch.uint8), weight.new_empty(groups), weight.new_empty(groups)


SPECS = (
    OpSpec(quantize_int8, fake=fake_int8),
    OpSpec(quantize_int4, fake=fake_int4),
)
