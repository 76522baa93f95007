"""infinilm.llm.cache_manager: the engine's BlockManager under InfiniLM's name."""

from __future__ import annotations

from ....engine import BlockManager
from .import_only import ImportOnly

__all__ = ["Block", "BlockManager"]


class Block(ImportOnly):
    """A name that scripts import: blocks are numbers here, found again by their tokens."""

    reason = (
        "the engine's blocks are numbers; BlockManager allocates, shares and releases them, and its `free` and `kept` "
        "count them"
    )
