"""quantize_table4: rows of a weight as 4-bit indices into a table, with scales, for linear_table4.

The kernel is csrc/infiniop/linear_table4/quantize_table4_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def quantize_table4(packed: Tensor, scales: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Quantize rows of a weight to 4.5 bits, and write them into a packed one, in place.

    Each group of 16 columns of a row gets a scale and, for each element, the index of a level of linear_table4's table.
    The scale is fitted: for each of 15 places in the table that the group's largest element (by magnitude) may be
    mapped to, elements are assigned the nearest level, and the scale is the one with the least squared error for these
    levels; the best of the 15 is used. The row's scale is the largest group scale divided by 127; group scales are
    divided by it and rounded to int8, ties to even; then elements are assigned the nearest level again. Everything is
    computed in float32 and gives the same bits on every CPU. A row that holds infinity or NaN has scale NaN and is 0
    otherwise.

    Args:
        packed: [panels of 16 rows, k / 64 rounded up, 576] uint8 on the CPU, contiguous, written; other rows are not
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
        >>> from torch_infini.ops._panels import TABLE4
        >>> row = torch.arange(first_row, first_row + weight.shape[0])
        >>> indices, group_scales, scales[row] = TABLE4.quantize(weight)
        >>> TABLE4.put_rows(packed, row, indices, group_scales)

    Source: Lloyd, Least squares quantization in PCM, IEEE Transactions on Information Theory 28(2), 1982, for the
        levels; Dai et al., VS-Quant, MLSys 2021, for group scales as small integers times a float.
    """
    torch.ops.infini.quantize_table4.default(packed, scales, weight, first_row)


SPEC = OpSpec(
    quantize_table4,
    schema="(Tensor(a!) packed, Tensor(b!) scales, Tensor weight, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed",),
    devices=("cpu",),
)
