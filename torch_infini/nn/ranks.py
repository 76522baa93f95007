"""Ranks: the old name of torch_infini.distributed.TPGroup, with the old names of its methods, for one release.

Each warns and calls the new one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from ..distributed import TPGroup


def _warn(old: str, new: str) -> None:
    message = f"torch_infini.nn.{old} is deprecated and will be removed in the next release, use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


@dataclass(frozen=True)
class Ranks(TPGroup):
    """A TPGroup under its old names."""

    def __post_init__(self) -> None:
        _warn("Ranks", "torch_infini.distributed.TPGroup")

    def share(self, what: str, count: int) -> tuple[int, int]:
        _warn("Ranks.share", "TPGroup.shard")
        return self.shard(what, count)

    def share_or_repeat(self, what: str, count: int) -> tuple[int, int]:
        _warn("Ranks.share_or_repeat", "TPGroup.shard_or_replicate")
        return self.shard_or_replicate(what, count)

    def share_rows(self, count: int) -> tuple[int, int, int]:
        _warn("Ranks.share_rows", "TPGroup.shard_rows")
        return self.shard_rows(count)

    def add_up(self, x: Tensor) -> Tensor:
        _warn("Ranks.add_up", "TPGroup.all_reduce")
        return self.all_reduce(x)

    def side_by_side(self, x: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
        _warn("Ranks.side_by_side", "TPGroup.all_gather")
        return self.all_gather(x, columns, out)
