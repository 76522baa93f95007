"""fused_linear: the products of one x with two or three weights, as of q/k/v and gate/up, concatenated.

The kernel is csrc/infiniop/linear, shared with linear; the weights are separate tensors and are not copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec


def fused_linear(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
    bias_c: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of x by two or three transposed weights at once and concatenate the results.

    y = concat(x @ a^T + bias_a, x @ b^T + bias_b, x @ c^T + bias_c), each part with the bits that linear gives for that
    weight (on CUDA: for as many rows as linear streams). The columns of all weights together are split among threads.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        a: [na, k], dtype of x; stride 1 in the last dimension, any row stride. It is read in place.
        b: [nb, k], as a.
        c: [nc, k], as a, or None.
        bias_a: [na], dtype of x or float32, or None.
        bias_b: [nb], dtype of x or float32, or None.
        bias_c: [nc], dtype of x or float32, or None; must be None if c is.
        out: [..., na + nb + nc], written and returned instead of a new tensor; must not share memory with the
            arguments.

    Returns:
        [..., na + nb + nc], contiguous, dtype of x; nc is 0 without c.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or a bias_c without c.

    Equivalent to:
        >>> parts = [(a, bias_a), (b, bias_b), (c, bias_c)][: 2 if c is None else 3]
        >>> y = torch.cat([torch.nn.functional.linear(x, weight, bias) for weight, bias in parts], -1)

    Source: see linear.
    """
    if out is None:
        return torch.ops.infini.fused_linear.default(x, a, b, c, bias_a, bias_b, bias_c)
    return torch.ops.infini.fused_linear.out(x, a, b, c, bias_a, bias_b, bias_c, out=out)


def fake(x: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, *biases: Any) -> Tensor:
    n = a.shape[0] + b.shape[0] + (c.shape[0] if c is not None else 0)
    return x.new_empty((*x.shape[:-1], n))


SPEC = OpSpec(fused_linear, fake=fake)
