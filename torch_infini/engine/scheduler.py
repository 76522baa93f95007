"""Scheduler: chooses the tokens that the next step computes, and allocates the cache blocks that they need.

Sequences that generate are scheduled first, one token each; chunks of prompts fill up the step. First come, first
served; the latest sequence is preempted when no block is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from .blocks import BlockManager, OutOfBlocks
from .sequence import Sequence
from .states import StateRows


class ScheduledChunk(NamedTuple):
    """A chunk of a sequence in a step: `num_tokens` tokens from index `start` on, and guesses of the next ones."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft: tuple[int, ...] = ()


class Scheduler:
    """Holds the waiting and the running sequences.

    Args:
        blocks: The cache's blocks.
        max_num_seqs: The most sequences that run at a time.
        max_num_batched_tokens: A step that has this many prompt tokens takes no further chunk of a prompt. Larger steps
            take less time per token, but sequences that generate wait for them.
        chunk_size: Prompts are cut at multiples of this many tokens, however many chunks of a prompt a step takes;
            generated tokens are computed one by one, also after a preemption. So the tokens that are computed together,
            and with them the last bits of the result, depend neither on other requests nor on preemption. A cached
            prefix of a prompt ends at such a multiple.
        reuse_generated: Whether blocks with generated tokens, and with the last tokens of prompts, are cached.
        states: Rows for what the model keeps of each sequence beside keys and values; None: nothing. A cached prefix
            then ends where a state was kept, after a whole chunk.

    Attributes:
        waiting: Sequences that have not begun or were preempted; the first is scheduled first.
        running: Sequences in the order of their requests.
        copies: (from, to) of blocks to copy before the step that was scheduled last.
        state_copies: Likewise of rows of states.
        preemptions: The number of preemptions so far.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunk_size: int,
        reuse_generated: bool = True,
        states: StateRows | None = None,
    ) -> None:
        self.blocks, self.max_num_seqs = blocks, max_num_seqs
        self.max_num_batched_tokens, self.chunk_size = max_num_batched_tokens, chunk_size
        self.reuse_generated = reuse_generated
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.states = states
        self.state_copies: list[tuple[int, int]] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to the waiting ones."""
        self.waiting.append(sequence)

    def add_first(self, sequences: SequenceOf[Sequence]) -> None:
        """Put sequences in front of the waiting ones."""
        self.waiting.extendleft(reversed(sequences))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run a new sequence that shares the blocks of a running one."""
        child.blocks = list(parent.blocks)
        child.computed, child.num_cached, child.identity = parent.computed, parent.num_cached, parent.identity
        child.is_long = parent.is_long
        if self.states is not None:
            child.state = self.states.fork(parent.state)
        self.blocks.share(child.blocks)
        self.running.insert(self.running.index(parent) + 1, child)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence, waiting or running, and release its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Reset to a state in which these sequences, which hold no blocks, wait and all blocks are free."""
        self.waiting, self.running, self.copies = deque(sequences), [], []
        self.state_copies = []
        if self.states is not None:
            self.states.restart()
        self.blocks.release_all()

    def forget_states(self) -> None:
        """Drop the states of prefixes."""
        if self.states is not None:
            self.states.forget()

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the chunks of the next step and allocate their blocks.

        Returns:
            The chunks; none if no sequence waits or runs.
        """
        self.copies = []
        for sequence in self.running:
            if sequence.must_be_long and not sequence.is_long:  # it became so: all keys get another rotation
                self._release(sequence)
                self._begin(sequence, *self._match(sequence))
        before = self.preemptions
        chunks = [ScheduledChunk(sequence, sequence.computed, 1) for sequence in self._generating()]
        budget = self.max_num_batched_tokens
        for sequence in [s for s in self.running if s.remaining > 1]:
            if budget > 0 and sequence in self.running:  # it may have been preempted meanwhile
                budget -= self._append_chunks(sequence, chunks, budget)
        while budget > 0 and self.preemptions == before and self._admit():
            budget -= self._append_chunks(self.running[-1], chunks, budget)
        # A sequence may have been preempted after its chunk was chosen.
        chunks = [chunk for chunk in chunks if chunk.sequence.blocks]
        if chunks and self.states is not None:
            self.state_copies, self.states.copies = self.states.copies, []
        return chunks

    def _generating(self) -> Iterator[Sequence]:
        """Yield the sequences that generate and got the block they need."""
        for sequence in [s for s in self.running if s.remaining == 1]:
            if sequence in self.running and self._reserve(sequence, sequence.computed + 1):
                yield sequence

    def _append_chunks(self, sequence: Sequence, chunks: list[ScheduledChunk], budget: int) -> int:
        """Append the sequence's next chunks until they have at least `budget` tokens; return how many they have."""
        start = at = sequence.computed
        while at - start < budget and at < len(sequence.tokens):
            end = self._chunk_end(sequence, at)
            if at > start and self.states is not None:
                break  # a state is read and written once in a step
            if at > start and self.blocks.needed(end) - len(sequence.blocks) > self.blocks.free:
                break  # no sequence is preempted for a second chunk
            if not self._reserve(sequence, end):
                return 0
            chunks.append(ScheduledChunk(sequence, at, end - at))
            at = end
        return at - start

    def _chunk_end(self, sequence: Sequence, at: int) -> int:
        """Return where the chunk that begins at token `at` ends."""
        last = sequence.in_chunks
        if at >= last:
            return at + 1
        end = min(last, (at // self.chunk_size + 1) * self.chunk_size)
        return next((b for a, b in sequence.spans if a < end < b), end)

    def _admit(self) -> bool:
        """Run the first waiting sequence if blocks for all of its tokens are free."""
        if not self.waiting:
            return False
        sequence = self.waiting[0]
        samples = min(sequence.samples, self.max_num_seqs)
        if sum(s.samples for s in self.running) + samples > self.max_num_seqs:
            return False
        found, identity = self._match(sequence)
        # Leave one block for each running sequence: otherwise they would preempt this one at once.
        wanted = self.blocks.needed(len(sequence.tokens) + 1) - len(found)
        if wanted + len(self.running) > self.blocks.free and self.running:
            self.blocks.release(found)
            return False
        self.waiting.popleft()
        self._begin(sequence, found, identity)
        if sequence.generated == 0 and sequence.index == 0:
            sequence.request.reused = sequence.computed
        self.running.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> tuple[list[int], int]:
        """Find the cached blocks that a sequence without blocks begins with; as BlockManager.match."""
        sequence.is_long = sequence.must_be_long
        request, last = sequence.request, sequence.in_chunks
        # prompt_logprobs needs all logits of the prompt, and a mean all hidden states.
        reuses = request.params.prompt_logprobs is None and (request.pooling is None or request.pooling.reuses_prefix)
        states = self.states

        def may_end(tokens: int, identity: int) -> bool:
            whole = tokens >= last or tokens % self.chunk_size == 0
            whole = whole and not any(a < tokens < b for a, b in sequence.spans)
            return reuses and whole and (states is None or states.has(identity))

        return self.blocks.match(sequence.keys, may_end, sequence.root)

    def _begin(self, sequence: Sequence, found: list[int], identity: int) -> None:
        """Let a sequence without blocks begin with these, the result of _match."""
        sequence.blocks, sequence.num_cached, sequence.identity = found, len(found), identity
        sequence.computed = len(found) * self.blocks.block_size
        if self.states is not None:
            sequence.state = self.states.begin(identity if found else None)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for the sequence's first `tokens` tokens, preempting the latest sequences if necessary.

        Returns:
            False if the sequence itself was preempted.
        """
        blocks, size = self.blocks, self.blocks.block_size
        while True:
            try:
                last = sequence.computed // size
                if last < len(sequence.blocks) and blocks.is_shared(sequence.blocks[last]):
                    new = blocks.allocate()  # copy on write
                    self.copies.append((sequence.blocks[last], new))
                    blocks.release([sequence.blocks[last]])
                    sequence.blocks[last] = new
                while len(sequence.blocks) < blocks.needed(tokens):
                    sequence.blocks.append(blocks.allocate())
                return True
            except OutOfBlocks:
                latest = self.running[-1]
                self._preempt(latest)
                if latest is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.num_cached, sequence.identity = [], 0, 0, sequence.root
        if self.states is not None and sequence.state >= 0:
            self.states.release(sequence.state)
            sequence.state = -1

    def computed(self, chunk: ScheduledChunk) -> None:
        """Record that a chunk was computed, and make the blocks that are now full available to later sequences."""
        sequence, size = chunk.sequence, self.blocks.block_size
        sequence.computed = chunk.start + chunk.num_tokens
        most = sequence.computed
        if not self.reuse_generated:
            most = min(most, len(sequence.request.prompt) // self.chunk_size * self.chunk_size)
        cached, full = sequence.num_cached, most // size
        if full > cached:
            tokens = sequence.keys[cached * size : full * size]
            sequence.identity = self.blocks.cache_full_blocks(sequence.blocks[cached:full], sequence.identity, tokens)
            sequence.num_cached = full
            whole = sequence.computed % self.chunk_size == 0 and full * size == sequence.computed
            if self.states is not None and whole and sequence.computed <= sequence.in_chunks:
                self.states.keep(sequence.identity, sequence.state)
