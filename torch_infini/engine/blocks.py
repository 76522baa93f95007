"""BlockManager: allocates the blocks of a KVCache. Blocks have reference counts, and full ones are cached for reuse.

A cached block is looked up by the block before it and its own tokens, not by a hash: collisions are impossible.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

ROOT = 0  # identity of the empty prefix


class OutOfBlocks(Exception):
    """No block is free."""


class BlockManager:
    """Allocates the blocks 0 to blocks - 1.

    A block without references is free. A cached one keeps its tokens until it is allocated again; uncached blocks are
    allocated first, then cached ones, least recently freed first.

    Args:
        blocks: The number of blocks.
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
        self._uncached = list(range(blocks - 1, -1, -1))  # free blocks that are not cached; popped from the end
        self._kept: OrderedDict[int, None] = OrderedDict()  # free blocks that are cached; popped from the start
        self._block_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (before, tokens) -> (block, identity)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # cached block -> its key in _block_of
        self._identities = ROOT

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return len(self._uncached) + len(self._kept)

    @property
    def kept(self) -> int:
        """The number of free blocks that are cached."""
        return len(self._kept)

    def needed(self, tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """Allocate a block with one reference.

        Raises:
            OutOfBlocks: If no block is free.
        """
        if self._uncached:
            block = self._uncached.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        else:
            raise OutOfBlocks
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in order: the last are allocated again first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(f"block {block} has no reference")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._uncached.append(block)

    def release_all(self) -> None:
        """Free every block, whatever an interrupted call left behind; cached blocks stay cached."""
        cached = {b: key for b, key in self._key_of.items() if key in self._block_of and self._block_of[key][0] == b}
        oldest_first = [b for b in self._kept if b in cached] + [b for b in cached if b not in self._kept]
        self._block_of = {key: self._block_of[key] for key in cached.values()}
        self._key_of = cached
        self._references = [0] * self.blocks
        self._kept = OrderedDict.fromkeys(oldest_first)
        self._uncached = [b for b in range(self.blocks - 1, -1, -1) if b not in cached]

    def forget(self) -> None:
        """Drop the prefix cache: `match` finds no block cached before this call. Sequences keep their blocks."""
        self._uncached.extend(reversed(self._kept))
        self._kept, self._block_of, self._key_of = OrderedDict(), {}, {}

    def is_shared(self, block: int) -> bool:
        """Return whether the block has several references and so must not be written."""
        return self._references[block] > 1

    def match(
        self,
        tokens: Sequence[int],
        may_end: Callable[[int, int], bool] = lambda tokens, identity: True,
        root: int = ROOT,
    ) -> tuple[list[int], int]:
        """Find the cached blocks that a sequence of these tokens begins with, and add a reference to each.

        At least one token is left to compute, because its logits are needed.

        Args:
            tokens: The sequence's tokens.
            may_end: Returns whether a match of so many tokens, whose last block has this identity, is allowed.
            root: Identity of the sequence's empty prefix: ROOT, or a negative number (Sequence.root).

        Returns:
            (blocks, identity): full blocks, possibly none, and the `before` of the block that follows them.
        """
        blocks: list[int] = []
        identity, size = root, self.block_size
        whole, last = 0, root
        if self.reuse:
            for start in range(0, len(tokens) - size, size):
                found = self._block_of.get((identity, tuple(tokens[start : start + size])))
                if found is None:
                    break
                block, identity = found
                blocks.append(block)
                if may_end(start + size, identity):
                    whole, last = len(blocks), identity
            del blocks[whole:]
            self.share(blocks)
        return blocks, last

    def cache_full_blocks(self, blocks: Sequence[int], before: int, tokens: Sequence[int]) -> int:
        """Cache consecutive full blocks of a sequence, so that `match` finds them.

        Args:
            blocks: Allocated blocks whose tokens are all computed.
            before: Identity of the block in front of the first; the sequence's root at its beginning.
            tokens: The tokens of all of them, block_size each.

        Returns:
            The identity of the last block. If several blocks with the same tokens follow the same block, only the first
            is cached, and all get its identity.
        """
        if not self.reuse:
            return before
        size = self.block_size
        for i, block in enumerate(blocks):
            key = (before, tuple(tokens[i * size : (i + 1) * size]))
            found = self._block_of.get(key)
            if found is not None:
                before = found[1]
                continue
            self._identities += 1
            self._block_of[key] = (block, self._identities)
            self._key_of[block] = key
            before = self._identities
        return before
