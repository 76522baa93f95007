"""BlockManager: who holds which block of a KVCache. Blocks are counted, shared, and kept for reuse when they are freed.

A full block is known by the block before it and the tokens in it: by content, so that no hash can be mistaken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ROOT = 0  # identity of the empty prefix


class OutOfBlocks(Exception):
    """No block is free."""


class BlockManager:
    """Hands out the blocks 0 to blocks - 1.

    A block that nobody holds is free; if its tokens are known it keeps them until it is handed out again, the one that
    was freed first before others.

    Args:
        blocks: How many there are.
        block_size: Tokens in a block.
        reuse: Whether a sequence may begin with blocks that others filled with the same tokens.

    Raises:
        ValueError: For sizes below 1.
    """

    def __init__(self, blocks: int, block_size: int, reuse: bool = True) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"torch_infini.engine.BlockManager: {name} must be at least 1, got {value}")
        self.blocks, self.block_size, self.reuse = blocks, block_size, reuse
        self._references = [0] * blocks
        self._unknown = list(range(blocks - 1, -1, -1))  # free, without known tokens; the last goes first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with known tokens; the first goes first
        self._block_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (before, tokens) -> (block, identity)
        self._known_as: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its key there
        self._identities = ROOT

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._unknown) + len(self._kept)

    @property
    def kept(self) -> int:
        """Blocks that nobody holds, but whose tokens are known."""
        return len(self._kept)

    def needed(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """A block for one holder; OutOfBlocks if there is none."""
        if self._unknown:
            block = self._unknown.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._known_as.pop(block)]
        else:
            raise OutOfBlocks
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Let one more hold these blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, in their order: the last are the first to be handed out again."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(f"block {block} is held by nobody")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._known_as:
                    self._kept[block] = None
                else:
                    self._unknown.append(block)

    def release_all(self) -> None:
        """Let go of every block, in whatever state an interrupted call left them; what is known stays so."""
        known = {b: key for b, key in self._known_as.items() if key in self._block_of and self._block_of[key][0] == b}
        oldest_first = [b for b in self._kept if b in known] + [b for b in known if b not in self._kept]
        self._block_of = {key: self._block_of[key] for key in known.values()}
        self._known_as = known
        self._references = [0] * self.blocks
        self._kept = OrderedDict.fromkeys(oldest_first)
        self._unknown = [b for b in range(self.blocks - 1, -1, -1) if b not in known]

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block, who may then only read it."""
        return self._references[block] > 1

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Find known blocks that a sequence of these tokens may begin with, and hold them.

        At least one token is left to be computed, for its logits are wanted.

        Returns:
            (blocks, identity): whole blocks, maybe none, and what `know` takes for the block behind them.
        """
        blocks: list[int] = []
        identity, size = ROOT, self.block_size
        if self.reuse:
            for start in range(0, len(tokens) - size, size):
                found = self._block_of.get((identity, tuple(tokens[start : start + size])))
                if found is None:
                    break
                block, identity = found
                blocks.append(block)
            self.share(blocks)
        return blocks, identity

    def know(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """Make a full block known, so that `match` finds it.

        Args:
            block: Held, all of its tokens computed.
            before: Identity of the block before it; ROOT for a sequence's first.
            tokens: Those in the block.

        Returns:
            The block's identity; of several blocks with the same tokens behind the same block it is that of the first.
        """
        if not self.reuse:
            return ROOT
        key = (before, tuple(tokens))
        found = self._block_of.get(key)
        if found is not None:
            return found[1]
        self._identities += 1
        self._block_of[key] = (block, self._identities)
        self._known_as[block] = key
        return self._identities
