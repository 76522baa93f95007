"""Sampling of one token."""

from __future__ import annotations

from ..._arguments import raw
from ...lib import _infinicore
from ...tensor import Tensor


def random_sample(
    logits: Tensor, random_val: float, topp: float, topk: int, temperature: float, *, out: Tensor | None = None
) -> Tensor:
    """Return the token that a random number selects among the most likely ones; int32 without dimensions.

    Tokens are sorted by probability, exp((logit - largest) / temperature); the first topk are kept, and at most those
    that make up the share topp; the token is the first whose running sum reaches random_val times the kept sum. If
    random_val, topp or temperature is 0, or topk is 1, it is the most likely token (the first, if several are equal).

    Args:
        logits: [n].
        random_val: From 0 up to 1.
        out: int32 or int64, without dimensions.
    """
    function = "infinicore.nn.functional.random_sample"
    x = raw(logits, function, "logits")
    if out is None:
        return Tensor(_infinicore.random_sample(x, random_val, topp, topk, temperature))
    _infinicore.random_sample_(raw(out, function, "out"), x, random_val, topp, topk, temperature)
    return out
