"""Hooks of a model's modules that combine what its ranks compute: part of what the module computes, not of who watches.

split.py and linear.py register them. They stay where other hooks are left out (checks/trial.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import TPGroup


class RankHook:
    """A forward hook or pre-hook of a module that each rank has a part of."""


def combines_ranks(module: nn.Module) -> bool:
    """Return whether a module's results are combined with those of other ranks."""
    return any(isinstance(hook, RankHook) for hook in module._forward_hooks.values())


@dataclass(frozen=True)
class Sum(RankHook):
    """A forward hook: the result is the sum of the ranks' results, in the same bits on all of them."""

    tp_group: TPGroup

    def __call__(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return self.tp_group.all_reduce(y.contiguous())


@dataclass(frozen=True)
class Gather(RankHook):
    """A forward hook: the result is the ranks' results side by side.

    Attributes:
        columns: Of the whole result, as TPGroup.shard_rows divides them.
    """

    tp_group: TPGroup
    columns: int

    def __call__(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return all_gather(self.tp_group, y, self.columns)


@dataclass(frozen=True)
class Take(RankHook):
    """A forward pre-hook: the module gets some columns of its input."""

    first: int
    number: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0].narrow(-1, self.first, self.number), *args[1:]


@dataclass(frozen=True)
class First(RankHook):
    """A forward pre-hook: the module gets its input on rank 0, and zeros on the others, as its results are summed."""

    rank: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros_like(args[0]), *args[1:]) if self.rank else args


def all_gather(tp_group: TPGroup, y: Tensor, columns: int) -> Tensor:
    """Return the ranks' y [..., n] side by side, [..., columns]; as TPGroup.shard_rows divides the columns."""
    rows = y.reshape(-1, y.shape[-1])
    _, _, most = tp_group.shard_rows(columns)
    if rows.shape[1] < most:
        rows = nn.functional.pad(rows, (0, most - rows.shape[1]))
    return tp_group.all_gather(rows, columns).view(*y.shape[:-1], columns)
