"""RMS norm of a sum, as in decoder layers."""

from __future__ import annotations

from .._arguments import raw
from ..lib import _infinicore
from ..tensor import Tensor


def add_rms_norm(
    a: Tensor, b: Tensor, weight: Tensor, epsilon: float = 1e-5, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, a + b), where y is the RMS norm of a + b over the last dimension, times weight.

    `s = a + b; y = torch.nn.functional.rms_norm(s, weight.shape, weight, epsilon)`

    Args:
        a, b: [..., d].
        weight: [d].
        out: (y, residual_out), both of a's shape.
    """
    if out is not None:
        add_rms_norm_(out[0], out[1], a, b, weight, epsilon)
        return out
    function = "infinicore.add_rms_norm"
    y, total = _infinicore.add_rms_norm(
        raw(a, function, "a"), raw(b, function, "b"), raw(weight, function, "weight"), epsilon
    )
    return Tensor(y), Tensor(total)


def add_rms_norm_(y: Tensor, residual_out: Tensor, a: Tensor, b: Tensor, weight: Tensor, epsilon: float = 1e-5) -> None:
    """Write the results of add_rms_norm() to y and residual_out; the latter may be a or b."""
    function = "infinicore.add_rms_norm_"
    _infinicore.add_rms_norm_(
        raw(y, function, "y"),
        raw(residual_out, function, "residual_out"),
        raw(a, function, "a"),
        raw(b, function, "b"),
        raw(weight, function, "weight"),
        epsilon,
    )
