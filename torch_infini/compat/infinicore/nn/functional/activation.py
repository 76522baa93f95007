"""SiLU, and the gated unit based on it."""

from __future__ import annotations

import sys

from ..._arguments import raw
from ...lib import _infinicore
from ...tensor import Tensor

_PACKAGE = __name__.removesuffix(".nn.functional.activation")


def silu(input: Tensor, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return input * sigmoid(input); `torch.nn.functional.silu(input, inplace)`.

    On "cuda" and "musa" without `out`, the package ntops computes it if infinicore.use_ntops is true.
    """
    source = raw(input, "infinicore.nn.functional.silu", "input")
    if out is None:
        package = sys.modules[_PACKAGE]
        if package.use_ntops and input.device.type in ("cuda", "musa"):
            computed: Tensor = package.ntops.torch.silu(input, inplace=inplace)
            return computed
        if not inplace:
            return Tensor(_infinicore.silu(source))
        out = input
    _infinicore.silu_(raw(out, "infinicore.nn.functional.silu", "out"), source)
    return out


def swiglu(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return input * silu(other): the second argument is the gate; `input * torch.nn.functional.silu(other)`."""
    function = "infinicore.nn.functional.swiglu"
    up, gate = raw(input, function, "input"), raw(other, function, "other")
    if out is None:
        return Tensor(_infinicore.swiglu(up, gate))
    _infinicore.swiglu_(raw(out, function, "out"), up, gate)
    return out
