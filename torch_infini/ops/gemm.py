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

    As torch.addmm(c, a, b) and torch.baddbmm(c, a, b), but for beta, which is 0 unless given, as in the Infini C
    interface. Sums as in matmul: in float32, in an order that depends on k and the dtype alone; alpha and beta applied
    in float32, and one rounding. On CUDA, as in matmul; where alpha is 0, cuBLAS does not read a and b.

    Args:
        a: [..., m, k] or [k], float32, bfloat16 or float16. Each matrix lies row by row or column by column (stride 1
            in one of its two dimensions); all other strides are free.
        b: [..., k, n] or [k], dtype of a, laid out likewise; its leading dimensions broadcast with those of a.
        c: Broadcasts to the shape of a @ b; dtype of a; any strides; not read where beta is 0. None: beta must be 0.
        alpha: A finite number.
        beta: A finite number.
        out: Written and returned instead of a new tensor; laid out as a and b are. It may be c itself, which saves a
            copy of c, and shares no memory with a and b.

    Returns:
        [..., m, n], contiguous, dtype of a; without m where a is [k], without n where b is.

    Raises:
        RuntimeError: For a rank, shape, dtype or stride that cannot be served, a beta without c, or an alpha or beta
            that is not finite.

    Equivalent to:
        >>> y = alpha * torch.matmul(a, b)
        >>> y = y if beta == 0 else y + beta * c

    Source: Lawson, Hanson, Kincaid and Krogh, Basic Linear Algebra Subprograms, 1979, and Dongarra et al., A Set of
        Level 3 Basic Linear Algebra Subprograms, ACM TOMS 16(1), 1990.
    """
    op = torch.ops.infini.gemm
    return op.default(a, b, c, alpha, beta) if out is None else op.out(a, b, c, alpha, beta, out=out)


SPEC = OpSpec(gemm, fake=fake)
