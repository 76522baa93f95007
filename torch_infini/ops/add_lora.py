"""add_lora: LoRA adapters of many requests in one batch, added to the result of a linear layer.

The kernel is csrc/infiniop/add_lora.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> None:
    """Add to each row of y the product of its row of x with its own adapter, in place.

    y[t] += (x[t] a[s]^T) b[s] with s = index[t]; rows with a negative index stay as they are. Computed in float32, also
    x a^T, and rounded once. The bits of a row depend on no other row. Nothing is written unless every index is below
    slots; on CUDA, where the kernel reads them, a row with another index stays as it is.

    Args:
        y: [tokens, n] of x's dtype, written; stride 1 in the last dimension, any row stride: columns of a product that
            several projections share. It must share no memory with the others.
        x: [tokens, k] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        a: [slots, r, k] of x's dtype; stride 1 in the last dimension.
        b: [slots, r, n] of x's dtype; stride 1 in the last dimension. The adapters' second matrices, transposed and
            multiplied by their scales.
        index: [tokens] int64 or int32, the slot of each row's adapter; negative: none.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, memory that y shares, or, on the CPU, an index
            that is not below slots (the message names the first row).

    Equivalent to:
        >>> for t, s in enumerate(index.tolist()):
        >>>     if s >= 0:
        >>>         y[t] = (y[t].float() + x[t].float() @ a[s].float().T @ b[s].float()).to(y.dtype)

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv:2106.09685; Chen et al., Punica:
        Multi-Tenant LoRA Serving, 2023, arXiv:2310.18547.
    """
    torch.ops.infini.add_lora.default(y, x, a, b, index)


SPEC = OpSpec(add_lora, schema="(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor index) -> ()", fake=nothing)
