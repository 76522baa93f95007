"""Ranks: the old name of torch_infini.distributed.TPGroup, with the old names of its methods, for one release.

Each warns and calls the new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._deprecated import warn
from ..distributed import TPGroup


@dataclass(frozen=True)
class Ranks(TPGroup):
    """A TPGroup under its old names."""

    def __post_init__(self) -> None:
        warn("torch_infini.nn.Ranks", "torch_infini.distributed.TPGroup")

    def share(self, what: str, count: int) -> tuple[int, int]:
        warn("torch_infini.nn.Ranks.share", "TPGroup.shard")
        return self.shard(what, count)

    def share_or_repeat(self, what: str, count: int) -> tuple[int, int]:
        warn("torch_infini.nn.Ranks.share_or_repeat", "TPGroup.shard_or_replicate")
        return self.shard_or_replicate(what, count)

    def share_rows(self, count: int) -> tuple[int, int, int]:
        warn("torch_infini.nn.Ranks.share_rows", "TPGroup.shard_rows")
        return self.shard_rows(count)

    def add_up(self, x: Tensor) -> Tensor:
        warn("torch_infini.nn.Ranks.add_up", "TPGroup.all_reduce")
        return self.all_reduce(x)

    def side_by_side(self, x: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
        warn("torch_infini.nn.Ranks.side_by_side", "TPGroup.all_gather")
        return self.all_gather(x, columns, out)
