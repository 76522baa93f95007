"""Sequences of ops that carry a state: their tokens and rows of the state, for the references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def sequences(
    x: Tensor, inner: int, offsets: Tensor | None = None, slots: Tensor | None = None
) -> Iterator[tuple[Any, int]]:
    """Yield, for each sequence of x, the index of its tokens and its row of the state (-1: none).

    Args:
        x: [batch, length, ...] or [tokens, ...], with `inner` dimensions after the tokens.
        inner: As above.
        offsets: [sequences + 1], or None.
        slots: [sequences], or None.
    """
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    packed = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    where: list[Any] = [(s, slice(None)) for s in range(x.shape[0])] if x.ndim == inner + 2 else list(packed)
    for s, index in enumerate(where):
        yield index, s if slots is None else int(slots[s])
