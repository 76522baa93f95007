"""Weights in blocks: the kinds of block that infini::linear_blocks takes, computed in plain torch.

Each module here that defines KINDS describes some of them; csrc/infiniop/linear_blocks has their decoders. To add a
kind, add a file here and one there.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .kind import BlockKind, scale_at


def _found() -> dict[str, BlockKind]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    kinds: list[BlockKind] = [kind for module in modules for kind in getattr(module, "KINDS", ())]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.number)}


KINDS = _found()  # by name
OWN = 1000  # the first number that is not GGML's

__all__ = ["KINDS", "OWN", "BlockKind", "scale_at"]
