"""linear_int8 and linear_int4: products with weights that are stored as small integers.

The kernels are in csrc/infiniop/quantized_linear; torch_infini.weights makes the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .linear import fake


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    quantize_x: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of x by a transposed int8 weight with one scale per row of the weight, and add the bias.

    y = (x @ weight^T) * scales + bias. Without quantize_x, x keeps its precision: the integers become floats (bfloat16
    for bfloat16 x on AVX-512 BF16 and in AMX tiles, exactly), products are summed in float32, and the result is rounded
    once. The order of the sum depends on k alone.

    With quantize_x (W8A8), each row of x is quantized as in `torch_infini.weights.quantize_int8`, symmetrically with
    scale_x = max |row| / 127 and ties to even: an error of up to scale_x / 2 per element. Integer products are summed
    exactly, and y = sum * (scale_x * scales) + bias, in float32, is rounded once. A row that holds infinity or NaN
    gives NaN throughout; a row of zeros gives the bias.

    Either way a row gives the same bits whatever the thread count and the other rows of the call, except for products
    that cuBLAS computes on CUDA without quantize_x (64 rows or more). The two modes give different values; only
    quantize_x selects the mode.

    With few rows memory bandwidth is the limit, and the weight has half the bytes of bfloat16. Without quantize_x it is
    converted again for every 12 rows or less, and in prefill a dense product of bfloat16 is faster (in AMX tiles with
    bfloat16 x, it is converted for every 1024 rows; not timed on a CPU that has them). With quantize_x, on AVX-512
    VNNI, it is as fast as that at one or two rows, faster with more, and faster than a dense product with any number of
    rows. Without VNNI it is correct, but not fast. On CUDA the weight is read once for up to 16 rows of x, and again
    for every 32 rows beyond (with float32 x without quantize_x, for every 4). From 64 rows on cuBLAS multiplies: int8
    by int8 with quantize_x, if rows of the weight are aligned to 4 bytes; otherwise the weight is converted to the
    dtype of x, which holds the integers exactly, in slices that pass through a workspace, and scales are applied to the
    sums.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [n, k] int8; stride 1 in the last dimension, any row stride. It is read in place, unpacked;
            `torch_infini.weights.quantize_int8` makes it and the scales from a float weight.
        scales: [n] float32, or the dtype of x; stride 1.
        bias: [n], dtype of x or float32, or None.
        quantize_x: Whether x is quantized too. Then k must be at most 131071, so that int32 holds the sum.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> if quantize_x:
        ...     x = torch_infini.weights.dequantize_int8(*torch_infini.weights.quantize_int8(x), x.dtype)
        >>> dequantized = torch_infini.weights.dequantize_int8(weight, scales, x.dtype)
        >>> y = torch.nn.functional.linear(x, dequantized, bias)

    Source: Dettmers et al., LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale, NeurIPS 2022, for one
        scale per row of the weight and, with quantize_x, per row of x; without the part in float16.
    """
    if out is None:
        return torch.ops.infini.linear_int8.default(x, weight, scales, bias, quantize_x)
    return torch.ops.infini.linear_int8.out(x, weight, scales, bias, quantize_x, out=out)


def linear_int4(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    quantize_x: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of x by a transposed 4-bit weight with a scale and a zero for each group, and add the bias.

    y = x @ w^T + bias with w = (q - 8) * scale + zero, q from 0 to 15. Without quantize_x, x keeps its precision:
    within a group the products with q - 8 are summed in float32 and multiplied by the scale, and zero times the group's
    sum of x is added. The result is rounded once. The order of the sum depends on k and the group alone.

    With quantize_x (W4A8), each row of x is quantized as in linear_int8. Within a group, integer products, and x
    itself, are summed exactly; scale times the first sum plus zero times the second are added up over the groups in
    float32, in order; the total times scale_x, plus bias, is rounded once. A row that holds infinity or NaN gives NaN
    throughout; a row of zeros gives the bias.

    Either way a row gives the same bits whatever the thread count and the other rows of the call, except for products
    that cuBLAS computes on CUDA without quantize_x (64 rows or more). The two modes give different values; only
    quantize_x selects the mode.

    With few rows memory bandwidth is the limit, and the weight has a quarter of the bytes of bfloat16. Without
    quantize_x it is converted again for every 8 rows or less: from about 32 rows on a dense product of bfloat16 is
    faster (in AMX tiles with bfloat16 x, it is converted for every 1024 rows; not timed on a CPU that has them). With
    quantize_x, on AVX-512 VNNI, it is as fast as that at one row (faster if k is small), faster with more, and faster
    than a dense product with any number of rows. Without VNNI it is correct, but not fast. On CUDA, see linear_int8;
    float32 x is multiplied by (q - 8) * scale + zero, element by element. From 64 rows on, without quantize_x, cuBLAS
    multiplies by w rounded to the dtype of x, whose range w must not exceed. With quantize_x cuBLAS is never used: it
    would have to multiply group by group.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [n, k / 2] uint8: element 2i of a row in the lower half of byte i, 2i + 1 in the upper. Stride 1 in the
            last dimension, any row stride. `torch_infini.weights.quantize_int4` makes it, the scales and zeros from a
            float weight; `pack_int4` there packs integers that were quantized elsewhere.
        scales: [n, k / group] float32, or the dtype of x; group is 32, 64 or 128. Rows of stride 1.
        zeros: The shape and dtype of scales, or None for 0.
        bias: [n], dtype of x or float32, or None.
        quantize_x: Whether x is quantized too.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> if quantize_x:
        ...     x = torch_infini.weights.dequantize_int8(*torch_infini.weights.quantize_int8(x), x.dtype)
        >>> dequantized = torch_infini.weights.dequantize_int4(weight, scales, zeros, x.dtype)
        >>> y = torch.nn.functional.linear(x, dequantized, bias)

    Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, ICLR
        2023, for weights in groups; scale and zero have the meaning of torch's `_weight_int4pack_mm`.
    """
    if out is None:
        return torch.ops.infini.linear_int4.default(x, weight, scales, zeros, bias, quantize_x)
    return torch.ops.infini.linear_int4.out(x, weight, scales, zeros, bias, quantize_x, out=out)


SPECS = (
    OpSpec(linear_int8, fake=fake),
    OpSpec(linear_int4, fake=fake),
)
