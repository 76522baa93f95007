"""RMS norm and the softmax of causal attention, both over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

from ..._arguments import raw, sizes
from ...lib import _infinicore
from ...tensor import Tensor


def causal_softmax(input: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the softmax over the last dimension with a causal mask: 0 where a key is later than its query.

    Args:
        input: [..., n, m], scores of n queries and m keys, n <= m: query i sees keys up to i + m - n.
        out: Of the same shape.
    """
    function = "infinicore.nn.functional.causal_softmax"
    x = raw(input, function, "input")
    if out is None:
        return Tensor(_infinicore.causal_softmax(x))
    _infinicore.causal_softmax_(raw(out, function, "out"), x)
    return out


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """Return input / sqrt(mean(input ** 2, last dimension) + eps) * weight.

    `torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)`

    Args:
        input: [..., d].
        normalized_shape: [d], the shape of weight.
        weight: [d], of input's dtype, or float32 for a 16-bit input.
        out: Of input's shape.
    """
    function = "infinicore.nn.functional.rms_norm"
    x, w = raw(input, function, "input"), raw(weight, function, "weight")
    shape = sizes(normalized_shape, function, "normalized_shape")
    if shape != w.shape:
        raise AssertionError(f"{function}: normalized_shape must be the shape of weight, {w.shape}, got {shape}")
    if out is None:
        return Tensor(_infinicore.rms_norm(x, w, eps))
    _infinicore.rms_norm_(raw(out, function, "out"), x, w, eps)
    return out
