"""pack_linear: rows of a weight, laid out in the panels that linear_packed multiplies.

The kernel is csrc/infiniop/linear_packed/pack_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def pack_linear(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Write rows of a weight into a packed one, in place.

    packed[row // 48, i, row % 48] = weight[j, 2i : 2i + 2] with row = first_row + j; of an odd number of columns the
    last word has a 0. Other rows stay as they are: calls with different rows may run at the same time.

    Args:
        packed: [panels, k / 2 rounded up, 48, 2] bfloat16 on the CPU, contiguous, written.
        weight: [rows, k] bfloat16; stride 1 in the last dimension, rows at any distance.
        first_row: Which row of the packed weight the first one becomes.

    Returns:
        None.

    Raises:
        RuntimeError: For a rank, shape, dtype or stride that cannot be served, or rows for which there is no room.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> rows = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        >>> row = torch.arange(first_row, first_row + weight.shape[0])
        >>> packed[row // 48, :, row % 48] = rows

    Source: as linear_packed.
    """
    torch.ops.infini.pack_linear.default(packed, weight, first_row)


SPEC = OpSpec(
    pack_linear,
    schema="(Tensor(a!) packed, Tensor weight, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed",),
    devices=("cpu",),
)
