"""quantize_group8: rows of a weight as int8 with scales of groups, for linear_group8.

The kernel is csrc/infiniop/linear_group8/quantize_group8_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def quantize_group8(packed: Tensor, scales: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Quantize rows of a weight to 8.5 bits, and write them into a packed one, in place.

    The scale of a group of 16 columns is its largest magnitude divided by 127. The row's scale is the largest group
    scale divided by 127; group scales are divided by it and rounded up to integers, at most 127, so that no weight is
    clipped; weights are divided by the product of both scales and rounded to int8, ties to even. Everything is computed
    in float32 and gives the same bits on every CPU. A row that holds infinity or NaN has scale NaN and is 0 otherwise.

    Args:
        packed: [panels of 16 rows, k / 64 rounded up, 1088] uint8 on the CPU, contiguous, written; other rows are not
            touched: calls for different rows may run at the same time.
        scales: [at least first_row + rows] float32, written.
        weight: [rows, k] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        first_row: The row of the packed weight that weight's first row becomes.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or rows beyond the end of packed.
        NotImplementedError: For tensors that are not on the CPU: quantize there, then move packed and scales.

    Equivalent to:
        >>> from torch_infini.ops._panels import GROUP8
        >>> row = torch.arange(first_row, first_row + weight.shape[0])
        >>> integers, group_scales, scales[row] = GROUP8.quantize(weight)
        >>> GROUP8.put_rows(packed, row, integers, group_scales)

    Source: Dai et al., VS-Quant, MLSys 2021, for group scales as small integers times a float.
    """
    torch.ops.infini.quantize_group8.default(packed, scales, weight, first_row)


SPEC = OpSpec(
    quantize_group8,
    schema="(Tensor(a!) packed, Tensor(b!) scales, Tensor weight, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed",),
    devices=("cpu",),
)
