"""linear: the product of activations with a weight matrix, as in every projection of a transformer layer.

The kernels are in csrc/infiniop/linear; if ATen is faster it is called: gemm/library.cpp has the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Multiply the rows of x by the transposed weight and add the bias.

    y = x @ weight^T + bias, summed in float32 and rounded once. The kernel sums in an order that depends on k alone, so
    a row gives the same bits whatever the thread count and the other rows of the call. With so many rows that ATen
    computes the product (`python -m torch_infini env` shows the number), the order is ATen's. On CUDA the guarantee
    holds up to 16 rows (4 of float32), which stream the weight; cuBLAS multiplies more rows, in float32 without TF32,
    in an order that it chooses by shape, strides and alignment.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [n, k], dtype of x; stride 1 in the last dimension, any row stride. It is read in place.
        bias: [n], dtype of x or float32, or None.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> y = torch.nn.functional.linear(x, weight, bias)

    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008, for the
        blocking; the weight is not packed, because for few rows that would cost more than it gains.
    """
    op = torch.ops.infini.linear
    return op.default(x, weight, bias) if out is None else op.out(x, weight, bias, out=out)


def fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


SPEC = OpSpec(linear, fake=fake)
