"""pack_linear: rows of a weight, laid out in the panels that linear_packed multiplies.

The kernel is csrc/infiniop/linear_packed/pack_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def pack_linear(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Write rows of a weight into a packed one, in place.

    packed[row // 48, i, row % 48] = weight[j, 2i : 2i + 2] with row = first_row + j; if the number of columns is odd,
    the last word is padded with 0. Other rows are not touched: calls for different rows may run at the same time.

    Args:
        packed: [panels, k / 2 rounded up, 48, 2] bfloat16 on the CPU, contiguous, written.
        weight: [rows, k] bfloat16; stride 1 in the last dimension, any row stride.
        first_row: The row of the packed weight that weight's first row becomes.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or rows beyond the end of packed.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> rows = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        >>> row = torch.arange(first_row, first_row + weight.shape[0])
        >>> packed[row // 48, :, row % 48] = rows

    Source: see linear_packed.
    """
    torch.ops.infini.pack_linear.default(packed, weight, first_row)


SPEC = OpSpec(
    pack_linear,
    schema="(Tensor(a!) packed, Tensor weight, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed",),
    devices=("cpu",),
)
