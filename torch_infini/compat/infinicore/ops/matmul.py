"""Matrix products."""

from __future__ import annotations

from .._arguments import raw
from ..lib import _infinicore
from ..tensor import Tensor


def matmul(input: Tensor, other: Tensor, *, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return alpha * input @ other; `alpha * torch.matmul(input, other)`.

    Args:
        input: [..., m, k].
        other: [..., k, n], with as many dimensions; leading sizes equal input's, or are all 1 in one of the two.
        out: [..., m, n].

    Beyond three dimensions, the leading dimensions of each tensor must be mergeable; RuntimeError otherwise.
    """
    a, b = raw(input, "infinicore.matmul", "input"), raw(other, "infinicore.matmul", "other")
    if out is None:
        return Tensor(_infinicore.matmul(a, b, alpha))
    _infinicore.matmul_(raw(out, "infinicore.matmul", "out"), a, b, alpha)
    return out
