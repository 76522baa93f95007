"""Test cases of several parameters: all combinations, or so few that any two values of two parameters still meet.

Most faults need one value, or two that meet; the combinations of all parameters are for machines that are quick.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Some combinations of a value of each axis: every two values of two axes are in one of them. Always the same ones.

    The combination with most pairs that are in none so far comes next; of several such, the first of the product.
    """

    def pairs(places: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, places[a], places[b]) for a, b in itertools.combinations(range(len(axes)), 2)}

    candidates = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, chosen = set().union(*map(pairs, candidates)), []
    while missing:
        chosen.append(max(candidates, key=lambda places: len(pairs(places) & missing)))
        missing -= pairs(chosen[-1])
    return [tuple(axis[place] for axis, place in zip(axes, places, strict=True)) for places in sorted(chosen)]


def on_gpu_all(device: str | None, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations where the kernels run on a GPU; `all_pairs` of them where they are emulated, which is slow."""
    return list(itertools.product(*axes)) if device == "cuda" else all_pairs(*axes)
