"""infinilm.llm.cache_manager: the engine's BlockManager under InfiniLM's name.

Blocks are numbers there, found again by their tokens, so that Block has nothing to hold.
"""

from __future__ import annotations

from typing import Any

from ...engine import BlockManager

__all__ = ["Block", "BlockManager"]


class Block:
    """A name that scripts import.

    Raises:
        NotImplementedError: If it is instantiated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "torch_infini.infinilm.llm.Block: it must not be instantiated, for the engine's blocks are numbers; "
            "BlockManager allocates, shares and releases them, and its `free` and `kept` count them"
        )
