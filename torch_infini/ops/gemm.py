"""gemm: the product of matrices, scaled, added to another tensor.

The kernel is csrc/infiniop/gemm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .matmul import fake


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply matrices and add a tensor: alpha * a @ b + beta * c.

    As torch.addmm(c, a, b) and torch.baddbmm(c, a, b), except that beta defaults to 0, as in the Infini C interface.
    Summed as in matmul: in float32, in an order that depends only on k and the dtype; alpha and beta are applied in
    float32, with one rounding. On CUDA, see matmul; if alpha is 0, cuBLAS does not read a and b.

    Args:
        a: [..., m, k] or [k], float32, bfloat16 or float16. Each matrix is row-major or column-major (stride 1 in one
            of its two dimensions); all other strides are free.
        b: [..., k, n] or [k], dtype and layouts as for a; its leading dimensions broadcast with those of a.
        c: Broadcasts to the shape of a @ b; dtype of a; any strides; not read if beta is 0. None: beta must be 0.
        alpha: A finite number.
        beta: A finite number.
        out: Written and returned instead of a new tensor; layouts as for a. It may be c itself, which saves a copy of
            c, and must not share memory with a and b.

    Returns:
        [..., m, n], contiguous, dtype of a; without m if a is [k], without n if b is.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, a beta without c, or an alpha or beta that is not
            finite.

    Equivalent to:
        >>> y = alpha * torch.matmul(a, b)
        >>> y = y if beta == 0 else y + beta * c

    Source: Lawson, Hanson, Kincaid and Krogh, Basic Linear Algebra Subprograms, 1979, and Dongarra et al., A Set of
        Level 3 Basic Linear Algebra Subprograms, ACM TOMS 16(1), 1990.
    """
    op = torch.ops.infini.gemm
    return op.default(a, b, c, alpha, beta) if out is None else op.out(a, b, c, alpha, beta, out=out)


SPEC = OpSpec(gemm, fake=fake)
