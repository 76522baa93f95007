"""matmul: the product of matrices, batched and broadcast.

The kernel is csrc/infiniop/gemm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply matrices, with the shapes of torch.matmul.

    Products are summed in float32 in an order that depends only on k and the dtype, and rounded once: an element has
    the same bits in any batch, shape, layout and thread count. (On AVX-512 BF16, bfloat16 products are added in pairs,
    and denormals count as zero: docs/ops.md, Denormals.) On CUDA that holds for streamed products: up to 16 rows of a
    (4 of float32) with a column-major b, or as many columns of b with a row-major a. cuBLAS computes other products, in
    float32 without TF32, in an order that it chooses by shape, strides and alignment.

    Args:
        a: [..., m, k] or [k], float32, bfloat16 or float16. Each matrix is row-major or column-major (stride 1 in one
            of its two dimensions); all other strides are free.
        b: [..., k, n] or [k], dtype and layouts as for a. Its leading dimensions broadcast with those of a; a b that
            the whole batch shares is read in place.
        out: Written and returned instead of a new tensor; layouts as for a; must not share memory with a and b.

    Returns:
        [..., m, n], contiguous, dtype of a; without m if a is [k], without n if b is.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride: nothing is copied silently.

    Equivalent to:
        >>> y = torch.matmul(a, b)

    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008.
    """
    return torch.ops.infini.matmul.default(a, b) if out is None else torch.ops.infini.matmul.out(a, b, out=out)


def fake(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    batches = a.shape[:-2], b.shape[:-2]
    batch = torch.broadcast_shapes(*batches) if all(batches) else batches[0] or batches[1]
    return a.new_empty((*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ())))


def values(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Make values of either sign and 0.5 to 1.5 times `scale` in magnitude, so that a missing product is noticed."""
    g = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return ((0.5 + torch.rand(shape, generator=g)) * sign * scale).to(dtype)


SPEC = OpSpec(matmul, fake=fake)
