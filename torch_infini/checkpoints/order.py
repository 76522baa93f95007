"""Order: where a file has the rows or columns of a weight, if not where the model has them.

GGUF's files of LLaMA have the two halves of a head interleaved, those of Qwen 3.5 the value heads of each key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Rows in groups [outer, inner, size] of the model, which a file has as [inner, outer, size].

    Attributes:
        outer: The number of runs in a group of the model; each has `inner` pieces.
        inner: The number of runs in a group of the file; each has `outer` pieces.
        size: The rows of a piece, which follow each other in both.
        first: The first row of the first group; rows before it are in their places.
    """

    outer: int
    inner: int
    size: int = 1
    first: int = 0

    def unit(self, n: int) -> int:
        """Return how many of n rows belong together: a multiple of it has its rows in the same places in both."""
        return n if self.first else self.outer * self.inner * self.size

    def index(self, n: int) -> Tensor:
        """Return where the file has each of the model's n rows; ValueError if they are not whole groups."""
        group = self.outer * self.inner * self.size
        if group < 1 or n < self.first or (n - self.first) % group:
            raise ValueError(f"rows must be {self.first} and groups of {group}, got {n}")
        rows = torch.arange(self.first, n).view(-1, self.inner, self.outer, self.size).transpose(1, 2)
        return torch.cat((torch.arange(self.first), rows.flatten()))


def halves(head: int) -> Order:
    """Return the order of heads of `head` rows of which a file has rows 0, half, 1, half + 1 ..."""
    return Order(2, head // 2)
