"""Ranks: those who share a model by tensor parallelism, seen from one of them.

Each has a part of the heads, of the MLP's columns and of the vocabulary: what it computes of a layer is part of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..distributed.workers import Workers


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model. All of them compute the same tokens, at the same time.

    Attributes:
        rank: This one, 0 to size - 1.
        size: How many there are.
        group: Their number for torch.ops.infini.all_reduce, of torch_infini.distributed.
        workers: The other ranks' processes, if this one started them and has to tell them what to compute.

    Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019,
        arXiv:1909.08053.
    """

    rank: int
    size: int
    group: int
    workers: Workers | None = None

    def share(self, what: str, count: int) -> tuple[int, int]:
        """(first, number) of this rank's part of `count` things, which all ranks have equally many of.

        Raises:
            ValueError: If the ranks do not divide them.
        """
        if count % self.size:
            raise ValueError(f"torch_infini.nn.Ranks: {what} must be a multiple of the ranks, {self.size}, got {count}")
        number = count // self.size
        return self.rank * number, number

    def share_or_repeat(self, what: str, count: int) -> tuple[int, int]:
        """The same where several ranks may have the same thing, if there are fewer of them."""
        if count < self.size:
            if self.size % count:
                raise ValueError(
                    f"torch_infini.nn.Ranks: {what} must divide the ranks, {self.size}, or be a multiple of them, "
                    f"got {count}"
                )
            return self.rank * count // self.size, 1
        return self.share(what, count)

    def share_rows(self, count: int) -> tuple[int, int, int]:
        """(first, number, most): the part of the rows of a table, of which the last ranks may have fewer or none, and
        how many the first rank has."""
        most = -(-count // self.size)
        first = min(self.rank * most, count)
        return first, min(most, count - first), most

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its own memory; the same bits on all of them."""
        return torch.ops.infini.all_reduce.out(x, self.group, out=x)

    def side_by_side(self, x: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
        """Put all ranks' x [n, most] side by side: [n, columns], in `out` where it is given; the rest is cut off."""
        n, most = x.shape
        parts = torch.ops.infini.all_gather.default(x, self.group, self.size).view(self.size, n, most)
        y = x.new_empty(n, columns) if out is None else out
        for rank in range(self.size):
            first = rank * most
            if first < columns:
                part = parts[rank, :, : columns - first]
                torch.ops.infini.rearrange.out(part, out=y[:, first : first + part.shape[1]])
        return y

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8)
        return bool(torch.ops.infini.all_reduce.default(flags, self.group, 2))  # the maximum

    def generator(self) -> torch.Generator:
        """A generator of random numbers, which are the same on all ranks: rank 0 draws its seed."""
        seed = torch.randint(2**62, (1,))
        return torch.Generator().manual_seed(int(torch.ops.infini.broadcast.default(seed, self.group, 0)))

    def must_agree(self, what: str, digest: bytes) -> None:
        """Compare 32 bytes with those of the other ranks.

        Raises:
            ValueError: On all ranks, naming those that differ from rank 0.
        """
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_of_them = torch.ops.infini.all_gather.default(own, self.group, self.size).view(self.size, -1)
        different = [rank for rank in range(self.size) if not torch.equal(all_of_them[rank], all_of_them[0])]
        if different:
            raise ValueError(
                f"torch_infini.nn.Ranks: {what} must be the same on all ranks, got another one on rank "
                f"{', '.join(map(str, different))} than on rank 0"
            )
