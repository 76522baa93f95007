"""Rotary position embedding."""

from __future__ import annotations

from ..._arguments import described, raw
from ...lib import _infinicore
from ...tensor import Tensor


class RopeAlgo:
    """Which elements of a head form a pair: neighbours (GPT_J), or elements half a head apart (GPT_NEOX)."""

    GPT_J = _infinicore.RoPEAlgo.GPT_J
    GPT_NEOX = _infinicore.RoPEAlgo.GPT_NEOX


def rope(
    x: Tensor,
    pos_ids: Tensor,
    sin_table: Tensor,
    cos_table: Tensor,
    algo: _infinicore.RoPEAlgo = RopeAlgo.GPT_NEOX,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return x with each pair (a, b) of a head's elements rotated: (a cos - b sin, b cos + a sin).

    Args:
        x: [n, heads, d] or [batch, n, heads, d].
        pos_ids: The tokens' positions, rows of the tables, int32 or int64: [n], or [batch, n] for a batch.
        sin_table, cos_table: [positions, d / 2]. Note the order.
        algo: RopeAlgo.GPT_J or RopeAlgo.GPT_NEOX.
        out: Of x's shape; may be x.
    """
    function = "infinicore.nn.functional.rope"
    if not isinstance(algo, _infinicore.RoPEAlgo):
        raise TypeError(f"{function}: algo must be RopeAlgo.GPT_J or RopeAlgo.GPT_NEOX, got {described(algo)}")
    source = raw(x, function, "x")
    positions = raw(pos_ids, function, "pos_ids")
    sin, cos = raw(sin_table, function, "sin_table"), raw(cos_table, function, "cos_table")
    if out is None:
        return Tensor(_infinicore.rope(source, positions, sin, cos, algo))
    _infinicore.rope_(raw(out, function, "out"), source, positions, sin, cos, algo)
    return out
