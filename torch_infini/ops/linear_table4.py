"""linear_table4: the product with a weight of 4-bit indices into a table of 16 levels, 4.5 bits per weight with scales.

The kernel is in csrc/infiniop/linear_table4; quantize_table4 makes the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def linear_table4(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a transposed weight of table indices, and add the bias.

    w = scales[row] * group_scale * table[index], with an int8 scale per 16 columns and the levels (-64, -52, -42, -32,
    -24, -17, -10, -4, 1, 6, 12, 18, 25, 33, 42, 57), which are dense where weights are. Each run of 128 columns of a
    row of x becomes int8 with the scale max |run| / 127, rounded as in `torch_infini.weights.quantize_int8`. Within a
    run, products and group scales are multiplied and summed exactly as integers; runs, times their scales, are added in
    float32 in order, and the total times scales[row], plus bias, is rounded once. A row gives the same bits whatever
    the device, the thread count, and the other rows of the call. A run with infinity or NaN makes its row NaN; a row of
    zeros gives the bias.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [at least n / 16, k / 64 rounded up, 576] uint8, contiguous; made by quantize_table4. Columns beyond k
            count as 0, whatever they hold.
        scales: [n] float32, stride 1.
        bias: [n], dtype of x or float32, or None.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> from torch_infini.ops._panels import TABLE4
        >>> w = TABLE4.dequantize(weight, scales, x.shape[-1])
        >>> b = None if bias is None else bias.float()
        >>> y = torch.nn.functional.linear(TABLE4.quantized_x(x), w, b).to(x.dtype)

    Source: Dettmers and Zettlemoyer, The case for 4-bit precision: k-bit Inference Scaling Laws, ICML 2023, for small
        groups and levels by quantiles; the levels here minimize the squared error with fitted scales.
    """
    op = torch.ops.infini.linear_table4
    return op.default(x, weight, scales, bias) if out is None else op.out(x, weight, scales, bias, out=out)


def fake(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


SPEC = OpSpec(linear_table4, fake=fake, contiguous=("weight",))
