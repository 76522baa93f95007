"""linear_packed: the product with a weight that pack_linear has laid out for the CPU's multiply units, in bfloat16.

The kernel is in csrc/infiniop/linear_packed. Models store their dense weights packed if that is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def linear_packed(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a packed weight, transposed, and add the bias.

    y = x @ w^T + bias, where w is the weight [n, k] that was packed; summed in float32 in a fixed order and rounded
    once: a row gives the same bits whatever the thread count and the other rows of the call.

    Args:
        x: [..., k] bfloat16 on the CPU; stride 1 in the last dimension, any other strides.
        weight: [at least n / 48, k / 2 rounded up, 48, 2] bfloat16, contiguous; packed by pack_linear. An odd k and the
            next even one have the same shape: the missing column counts as 0.
        n: The number of rows of w, columns of y.
        bias: [n] bfloat16 or float32, or None.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n] bfloat16, contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> w = weight.transpose(1, 2).flatten(2).flatten(0, 1)[:n, : x.shape[-1]]
        >>> y = torch.nn.functional.linear(x, w, bias)

    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008: the panels,
        which here are made once instead of in each call.
    """
    op = torch.ops.infini.linear_packed
    return op.default(x, weight, n, bias) if out is None else op.out(x, weight, n, bias, out=out)


def fake(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


SPEC = OpSpec(linear_packed, fake=fake, contiguous=("weight",), devices=("cpu",))
