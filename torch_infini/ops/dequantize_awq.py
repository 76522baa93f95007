"""dequantize_awq: half-precision weights from AWQ's 4-bit integers.

The kernel is csrc/infiniop/dequantize_awq.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def dequantize_awq(qweight: Tensor, scales: Tensor, zeros: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Unpack a weight matrix that AWQ has quantized to 4 bits in groups of rows.

    weight = (q - zero) * scale, with the zero and scale of the row's group: row i belongs to group i / (k / groups).
    Column 8c + j of q and of the zeros is in bits 4b to 4b + 3 of integer c, with b = (0, 4, 1, 5, 2, 6, 3, 7)[j].
    Exact except for one rounding of the product.

    Args:
        qweight: [k, n / 8] int32; stride 1 in the last dimension, any row stride (as for the others).
        scales: [groups, n] float16; groups divides k.
        zeros: [groups, n / 8] int32, packed as qweight is.
        out: [k, n] float16, written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [k, n] float16, contiguous: the orientation of AWQ checkpoints, where k is the input features and the layer is x
        @ weight.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        >>> q, z = (((words.unsqueeze(-1) >> shifts) & 15).flatten(-2) for words in (qweight, zeros))
        >>> s, z = (group.repeat_interleave(q.shape[0] // scales.shape[0], 0) for group in (scales, z))
        >>> weight = (q - z) * s

    Source: Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2023,
        arXiv:2306.00978.
    """
    op = torch.ops.infini.dequantize_awq
    return op.default(qweight, scales, zeros) if out is None else op.out(qweight, scales, zeros, out=out)


def fake(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return qweight.new_empty((qweight.shape[0], 8 * qweight.shape[1]), dtype=torch.float16)


SPEC = OpSpec(dequantize_awq, fake=fake)
