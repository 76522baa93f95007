"""Matrix products."""

from __future__ import annotations

from .._arguments import raw
from ..lib import _infinicore
from ..tensor import Tensor


def matmul(input: Tensor, other: Tensor, *, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return alpha * input @ other; `alpha * torch.matmul(input, other)`.

    Args:
        input: [..., m, k].
        other: [..., k, n], of as many dimensions; leading ones are input's, or all 1 in one of the two.
        out: [..., m, n].

    Beyond three dimensions, the leading ones of each tensor must lie as one; RuntimeError otherwise.
    """
    a, b = raw(input, "infinicore.matmul", "input"), raw(other, "infinicore.matmul", "other")
    if out is None:
        return Tensor(_infinicore.matmul(a, b, alpha))
    _infinicore.matmul_(raw(out, "infinicore.matmul", "out"), a, b, alpha)
    return out
