"""infinilm.llm.cache_manager: the engine's BlockManager with InfiniLM's name."""

from __future__ import annotations

from ....engine import BlockManager
from .import_only import ImportOnly

__all__ = ["Block", "BlockManager"]


class Block(ImportOnly):
    """Exists for scripts that import it: here blocks are numbers, found again by their tokens."""

    reason = (
        "the engine's blocks are numbers; BlockManager allocates, shares and releases them, and its `free` and `kept` "
        "count them"
    )
