"""scaled_mm_int8: the product of int8 matrices with scales for rows and columns, as in W8A8 quantized layers.

The kernel is csrc/infiniop/int8_gemm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def scaled_mm_int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply int8 matrices and scale the result: (a @ b) * a_scale * b_scale + bias.

    The product is exact, in int32; the rest is computed in float32 and rounded once.

    Args:
        a: [m, k] int8; stride 1 in the last dimension; k at most 131071, so that int32 holds the product.
        b: [k, n] int8, any strides. A column-major b (stride 1 in the first dimension, as weight.t() of a weight [n,
            k]) is read in place; others are transposed on the way, panel by panel; on CUDA, byte by byte, which is
            slow.
        a_scale: [m] or [m, 1] float32; any strides.
        b_scale: [n] or [1, n] float32; any strides.
        bias: [n], of the result's dtype, or None; any strides.
        out_dtype: float32, bfloat16 or float16; None: that of bias (or of out), else bfloat16.
        out: Written and returned instead of a new tensor; stride 1 in the last dimension; must not share memory with
            the arguments.

    Returns:
        [m, n], contiguous, of out_dtype.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> product = torch.matmul(a.double(), b.double())  # exact
        >>> y = product * a_scale.view(-1, 1) * b_scale.view(1, -1)
        >>> y = (y if bias is None else y + bias).to(out_dtype or (torch.bfloat16 if bias is None else bias.dtype))

    Source: the int8 scheme of Dettmers, Lewis, Belkada and Zettlemoyer, LLM.int8(), 2022, arXiv:2208.07339, without its
        float16 part.
    """
    if out is None:
        return torch.ops.infini.scaled_mm_int8.default(a, b, a_scale, b_scale, bias, out_dtype)
    return torch.ops.infini.scaled_mm_int8.out(a, b, a_scale, b_scale, bias, out_dtype, out=out)


def fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or (torch.bfloat16 if bias is None else bias.dtype))


SPEC = OpSpec(scaled_mm_int8, fake=fake)
