"""Linear layers."""

from __future__ import annotations

from ..._arguments import raw, raw_or_none
from ...lib import _infinicore
from ...tensor import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias; `torch.nn.functional.linear(input, weight, bias)`.

    Args:
        input: [..., k].
        weight: [n, k].
        bias: [n].
        out: [..., n].
    """
    function = "infinicore.nn.functional.linear"
    x, w, b = raw(input, function, "input"), raw(weight, function, "weight"), raw_or_none(bias, function, "bias")
    if out is None:
        return Tensor(_infinicore.linear(x, w, b))
    _infinicore.linear_(raw(out, function, "out"), x, w, b)
    return out
