"""Sampling of one token."""

from __future__ import annotations

from ..._arguments import raw
from ...lib import _infinicore
from ...tensor import Tensor


def random_sample(
    logits: Tensor, random_val: float, topp: float, topk: int, temperature: float, *, out: Tensor | None = None
) -> Tensor:
    """Return the token that a random number chooses among the likeliest ones; int32 of no dimensions.

    Tokens are sorted by probability, exp((logit - largest) / temperature); kept are the first topk of them, and no more
    than make up the share topp; the token is the first whose running sum reaches random_val times the sum of these. If
    random_val, topp or temperature is 0, or topk is 1, it is the likeliest token, the first of equals.

    Args:
        logits: [n].
        random_val: From 0 up to 1.
        out: int32 or int64, of no dimensions.
    """
    function = "infinicore.nn.functional.random_sample"
    x = raw(logits, function, "logits")
    if out is None:
        return Tensor(_infinicore.random_sample(x, random_val, topp, topk, temperature))
    _infinicore.random_sample_(raw(out, function, "out"), x, random_val, topp, topk, temperature)
    return out
