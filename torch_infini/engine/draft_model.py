"""ModelDrafts: guesses of a smaller model with the same vocabulary, which follows the engine's sequences.

It has a cache of as many blocks as the engine's, so that a sequence's block table serves both, and a block that the
engine reuses or copies is reused or copied here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from .blocks import BlockManager
from .model import ServedModel
from .runner import ChunkInput, Runner
from .sampler import Sampler
from .scheduler import ScheduledChunk
from .sequence import Sequence
from .speculation import MAX_ROWS, Drafts, SpeculativeConfig, Times, is_decode, takes_guesses

_NAME = "torch_infini.Engine"
_PADDING = 1024  # ids by which the vocabularies of models with one tokenizer may differ


class _Followed(NamedTuple):
    """How far the draft model has computed a sequence.

    Attributes:
        tokens: The number of tokens whose keys and values it has.
        blocks: The sequence's list of blocks then: after a preemption it has another.
    """

    tokens: int
    blocks: list[int]


class ModelDrafts(Drafts):
    """Guesses tokens by a draft model, as many as pay.

    A guess is drawn with the seed and the settings of the token that it stands for: equal random numbers make equal
    tokens of similar distributions.

    Args:
        config: How.
        blocks: The engine's blocks.
        model: The draft model.
        vocabulary: The engine's model's number of ids.
        max_model_len: The most tokens of a sequence.
        record: Whether its steps are recorded.

    Raises:
        ValueError: As check_draft.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        blocks: BlockManager,
        model: ServedModel,
        vocabulary: int,
        max_model_len: int,
        record: bool,
    ) -> None:
        super().__init__(config, blocks)
        check_draft(model, vocabulary)
        self._model, self._vocabulary = model, vocabulary
        self._positions = min(max_model_len, model.config.max_position_embeddings)
        self._cache = model.new_cache(blocks.blocks, blocks.block_size)
        self._runner = Runner(model, self._cache, MAX_ROWS, max_model_len, record)
        self._sampler, self._draft_times = Sampler(), Times()
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()

    def added_to(self, chunks: list[ScheduledChunk], copies: SequenceOf[tuple[int, int]] = ()) -> list[ScheduledChunk]:
        """Return a step's chunks with guesses; the draft model computes what the step will."""
        if not chunks:
            return chunks
        rows = len(chunks)
        ready = is_decode(chunks) and self._times.knows(rows) and all(map(self._may_guess, chunks))
        wanted = self._common_counts(chunks) if ready else [0] * rows
        counts = [count and self._reserve(chunk.sequence, count) for chunk, count in zip(chunks, wanted, strict=True)]
        if not any(counts):
            self._follow(chunks, copies)
            return chunks
        return self._guessed(chunks, counts, copies)

    def judge(self, sequence: Sequence, guessed: int, right: int) -> None:
        """As Drafts': it has computed the tokens up to the last guess but one, of which those that were right count."""
        super().judge(sequence, guessed, right)
        followed = self._followed.get(sequence)
        if followed is not None:
            self._followed[sequence] = followed._replace(tokens=followed.tokens - max(guessed - 1 - right, 0))

    def _may_guess(self, chunk: ScheduledChunk) -> bool:
        sequence = chunk.sequence
        most = len(sequence.tokens) + self._config.num_speculative_tokens
        return takes_guesses(sequence) and most <= self._positions

    def _common_counts(self, chunks: list[ScheduledChunk]) -> list[int]:
        """Return how many tokens to guess of each sequence: as many of all, those with the most tokens a second."""
        rows = len(chunks)
        chances = [self._history(chunk.sequence).chance for chunk in chunks]
        gains, expected, own = [1.0] * rows, float(rows), self._draft_times.of(rows)
        best, count = rows / self._times.of(rows), 0
        for number in range(1, min(self._config.num_speculative_tokens, MAX_ROWS // rows - 1) + 1):
            gains = [gain * chance for gain, chance in zip(gains, chances, strict=True)]
            expected += sum(gains)
            if (rate := expected / (self._times.of(rows * (number + 1)) + number * own)) > best:
                best, count = rate, number
        if not count:
            for chunk in chunks:
                self._history(chunk.sequence).drift()
        lengths = [chunk.sequence.request.limit - len(chunk.sequence.tokens) - 1 for chunk in chunks]
        return [max(min(count, length), 0) for length in lengths]

    def _follow(self, chunks: list[ScheduledChunk], copies: SequenceOf[tuple[int, int]]) -> None:
        """Compute what a step without guesses does of prompts: others may begin with their blocks. Of generated tokens
        it is computed when the next guess is made.
        """
        inputs = []
        for chunk in chunks:
            sequence, start, end = chunk.sequence, self._start(chunk), chunk.start + chunk.num_tokens
            if chunk.start < len(sequence.request.prompt) and end <= self._positions:
                inputs.append(self._input(sequence, start, sequence.tokens[start:end])._replace(wanted=False))
                start = end
            self._followed[sequence] = _Followed(start, sequence.blocks)
        if inputs:
            self._runner.run(inputs, copies)
        else:
            self._cache.copy_blocks(copies)

    def _guessed(
        self, chunks: list[ScheduledChunk], counts: list[int], copies: SequenceOf[tuple[int, int]]
    ) -> list[ScheduledChunk]:
        drafts: list[list[int]] = [[] for _ in chunks]
        for number in range(max(counts)):
            begin = time.perf_counter()
            # In the first round each sequence is computed, also one of which nothing is guessed.
            which = [i for i, count in enumerate(counts) if count > number or not number]
            inputs = []
            for i in which:
                sequence = chunks[i].sequence
                start = len(sequence.tokens) + number - 1 if number else self._start(chunks[i])
                inputs.append(self._input(sequence, start, drafts[i][-1:] if number else sequence.tokens[start:]))
            tokens = sum(len(one.tokens) for one in inputs)
            as_rows = tokens <= MAX_ROWS  # of a decode step, which is recorded; else chunks, with a row for each
            logits = self._runner.run([one._replace(drafted=as_rows) for one in inputs], () if number else copies)
            if as_rows:
                logits = logits[torch.tensor([len(one.tokens) for one in inputs]).cumsum(0) - 1]
            rows = [chunks[i].sequence.row.along(drafts[i])[-1] for i in which]
            for i, one, result in zip(which, inputs, self._sampler(logits, rows), strict=True):
                # A row that cannot be sampled here ends nothing; its token is wrong, or right by chance.
                drafts[i].append(max(result.token, 0))
                self._followed[chunks[i].sequence] = _Followed(one.start + len(one.tokens), chunks[i].sequence.blocks)
            if tokens == len(which):
                self._draft_times.note(tokens, time.perf_counter() - begin)
        added = []
        for chunk, draft, count in zip(chunks, drafts, counts, strict=True):
            unknown = [place for place, token in enumerate(draft) if token >= self._vocabulary]
            added.append(chunk._replace(draft=tuple(draft[: min([count, *unknown])])))
        return added

    def _start(self, chunk: ScheduledChunk) -> int:
        """Return the first of a sequence's tokens to compute for a chunk; some before the chunk may not be computed."""
        followed = self._followed.get(chunk.sequence)
        if followed is None or followed.blocks is not chunk.sequence.blocks:
            return chunk.start
        return min(followed.tokens, chunk.start)

    def _input(self, sequence: Sequence, start: int, tokens: list[int]) -> ChunkInput:
        most = self._model.config.vocab_size
        return ChunkInput([token if token < most else 0 for token in tokens], start, sequence.blocks)


def check_draft(model: ServedModel, vocabulary: int) -> None:
    """Raise ValueError for a draft model that keeps states, has two rotations, or is of another vocabulary."""
    if model.bytes_per_sequence or model.rotary_switch is not None or model.tp_group is not None:
        raise ValueError(
            f"{_NAME}: the draft model must keep no states, have one rotation and be on one process, got one of type "
            f"{type(model).__name__}"
        )
    if abs(model.config.vocab_size - vocabulary) > _PADDING:
        raise ValueError(
            f"{_NAME}: the draft model must have the vocabulary of the model, {vocabulary} tokens, got "
            f"{model.config.vocab_size}"
        )
