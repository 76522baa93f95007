"""linear_group8: the product with an int8 weight that has a scale per 16 columns, 8.5 bits per weight with scales.

The kernel is in csrc/infiniop/linear_group8; quantize_group8 makes the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .linear_table4 import fake


def linear_group8(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a transposed int8 weight with scales of groups, and add the bias.

    w = scales[row] * group_scale * integer, with a scale from 0 to 127 per 16 columns. Each run of 64 columns of a row
    of x becomes int8 with the scale max |run| / 127, rounded as in `torch_infini.weights.quantize_int8`. Within a run,
    products and group scales are multiplied and summed exactly as integers; runs, times their scales, are added in
    float32 in order, and the total times scales[row], plus bias, is rounded once. A row gives the same bits whatever
    the device, the thread count, and the other rows of the call. A run with infinity or NaN makes its row NaN; a row of
    zeros gives the bias.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [at least n / 16, k / 64 rounded up, 1088] uint8, contiguous; made by quantize_group8. Columns beyond k
            count as 0, whatever they hold.
        scales: [n] float32, stride 1.
        bias: [n], dtype of x or float32, or None.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> from torch_infini.ops._panels import GROUP8
        >>> w = GROUP8.dequantize(weight, scales, x.shape[-1])
        >>> b = None if bias is None else bias.float()
        >>> y = torch.nn.functional.linear(GROUP8.quantized_x(x), w, b).to(x.dtype)

    Source: Dai et al., VS-Quant: Per-vector Scaled Quantization for Accurate Low-Precision Neural Network Inference,
        MLSys 2021.
    """
    op = torch.ops.infini.linear_group8
    return op.default(x, weight, scales, bias) if out is None else op.out(x, weight, scales, bias, out=out)


SPEC = OpSpec(linear_group8, fake=fake, contiguous=("weight",))
