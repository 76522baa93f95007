"""OwnExperts: the hook of experts of which a rank has some as a whole (enable_expert_parallel).

split.py registers it; a module of its own, because hooks.py stands below the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layers.experts import Experts, own_choices
from .hooks import RankHook


@dataclass(frozen=True)
class OwnExperts(RankHook):
    """A forward pre-hook: the original's forward gets the choices of this rank's experts; ours knows them by itself."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if isinstance(module, Experts) else own_choices(module, *args)
