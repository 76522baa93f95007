"""Scheduler: which tokens of which sequences the next step computes, and the blocks that they need.

Sequences that generate go first, a token each; pieces of prompts fill the step up. Who came first is served first, and
who came last gives its blocks back when there are none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .blocks import ROOT, BlockManager, OutOfBlocks
from .sequence import Sequence


class Piece(NamedTuple):
    """Tokens of a sequence that a step computes: `count` of them from `start` on."""

    sequence: Sequence
    start: int
    count: int


class Scheduler:
    """Keeps the sequences that wait and those that run.

    Args:
        blocks: The cache's blocks.
        max_sequences: How many run at a time.
        prompt_tokens: From so many tokens of prompts on a step takes no other piece of one: more take less time each,
            but those who generate wait for them.
        piece: A long prompt is cut at multiples of so many tokens, wherever in the step it stands and however many
            pieces of it a step takes: what attends together, and with it the last bits of the result, does not depend
            on other requests.

    Attributes:
        waiting: Not begun, or given back; the first goes first.
        running: By the order of their requests.
        copies: (from, to) of blocks to be copied before the step that was scheduled last.
        preemptions: How often a sequence was given back.
    """

    def __init__(self, blocks: BlockManager, max_sequences: int, prompt_tokens: int, piece: int) -> None:
        self.blocks, self.max_sequences, self.prompt_tokens, self.piece = blocks, max_sequences, prompt_tokens, piece
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence behind those that wait."""
        self.waiting.append(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence run beside the one whose blocks it shares."""
        child.blocks = list(parent.blocks)
        child.computed, child.known, child.identity = parent.computed, parent.known, parent.identity
        self.blocks.share(child.blocks)
        self.running.insert(self.running.index(parent) + 1, child)

    def remove(self, sequence: Sequence) -> None:
        """Let go of a sequence that ended, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Let these sequences, which hold no blocks, wait and all blocks be free, whatever was before."""
        self.waiting, self.running, self.copies = deque(sequences), [], []
        self.blocks.release_all()

    def schedule(self) -> list[Piece]:
        """The pieces of the next step; their blocks are allocated. Empty if nothing waits or runs."""
        self.copies = []
        before = self.preemptions
        pieces = [Piece(sequence, sequence.computed, 1) for sequence in self._generating()]
        budget = self.prompt_tokens
        for sequence in [s for s in self.running if s.remaining > 1]:
            if budget > 0 and sequence in self.running:  # it may have been given back meanwhile
                budget -= self._take(sequence, pieces, budget)
        while budget > 0 and self.preemptions == before and self._admit():
            budget -= self._take(self.running[-1], pieces, budget)
        # A piece's sequence may have given its blocks back to one that came before it.
        return [piece for piece in pieces if piece.sequence.blocks]

    def _generating(self) -> Iterator[Sequence]:
        """Those that generate and got the block they need."""
        for sequence in [s for s in self.running if s.remaining == 1]:
            if sequence in self.running and self._reserve(sequence, sequence.computed + 1):
                yield sequence

    def _take(self, sequence: Sequence, pieces: list[Piece], budget: int) -> int:
        """Add the sequence's next pieces until they have as many tokens as the budget; how many they have."""
        start = at = sequence.computed
        while at - start < budget and at < len(sequence.tokens):
            end = min(len(sequence.tokens), (at // self.piece + 1) * self.piece)
            if at > start and self.blocks.needed(end) - len(sequence.blocks) > self.blocks.free:
                break  # nobody gives blocks back for the sake of a second piece
            if not self._reserve(sequence, end):
                return 0
            pieces.append(Piece(sequence, at, end - at))
            at = end
        return at - start

    def _admit(self) -> bool:
        """Let the first that waits run, if blocks for all of its tokens are free."""
        if not self.waiting:
            return False
        sequence = self.waiting[0]
        if sum(s.samples for s in self.running) + sequence.samples > self.max_sequences:
            return False
        found, identity = self.blocks.match(sequence.tokens)
        # One block each for those that run already, lest a newcomer makes them give back at once.
        wanted = self.blocks.needed(len(sequence.tokens) + 1) - len(found)
        if wanted + len(self.running) > self.blocks.free and self.running:
            self.blocks.release(found)
            return False
        self.waiting.popleft()
        sequence.blocks, sequence.known, sequence.identity = found, len(found), identity
        sequence.computed = len(found) * self.blocks.block_size
        if sequence.generated == 0:
            sequence.request.reused = sequence.computed
        self.running.append(sequence)
        return True

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for so many tokens, if need be those of who came last; False if that is itself."""
        blocks, size = self.blocks, self.blocks.block_size
        while True:
            try:
                last = sequence.computed // size
                if last < len(sequence.blocks) and blocks.is_shared(sequence.blocks[last]):
                    new = blocks.allocate()  # it writes there, and others read it
                    self.copies.append((sequence.blocks[last], new))
                    blocks.release([sequence.blocks[last]])
                    sequence.blocks[last] = new
                while len(sequence.blocks) < blocks.needed(tokens):
                    sequence.blocks.append(blocks.allocate())
                return True
            except OutOfBlocks:
                latest = self.running[-1]
                self._give_back(latest)
                if latest is sequence:
                    return False

    def _give_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.known, sequence.identity = [], 0, 0, ROOT

    def computed(self, piece: Piece) -> None:
        """Note that a piece was computed: full blocks become known to those who come later."""
        sequence, size = piece.sequence, self.blocks.block_size
        sequence.computed = piece.start + piece.count
        while (sequence.known + 1) * size <= sequence.computed:
            at = sequence.known * size
            tokens = sequence.tokens[at : at + size]
            sequence.identity = self.blocks.know(sequence.blocks[sequence.known], sequence.identity, tokens)
            sequence.known += 1
