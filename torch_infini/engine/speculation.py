"""Speculative decoding: SpeculativeConfig, and Drafts, which guesses a sequence's next tokens from its own text;
draft_model.py has guesses of a smaller model.

A step computes guessed tokens behind the newest one, as further rows of one decode step, which reads the weights once.
The engine samples every row with the seed and settings that its token would have had, and keeps the tokens up to the
first that was guessed wrong: they are those of the same request without speculation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

from .blocks import BlockManager
from .sampling_params import is_integer
from .scheduler import ScheduledChunk
from .sequence import Sequence

_NAME = "torch_infini.SpeculativeConfig"
MAX_ROWS = 16  # of a step with guesses
_CANDIDATES = 16  # earlier places of a text that are compared with its end
_CHANCE = 0.6  # that a guess is right, before any was made
_NEWEST = 0.2  # weight of the newest measurement in a mean
_RETURN = 0.03  # how far a chance goes back to _CHANCE in a step whose guess was not tried, so that it will be


@dataclass(frozen=True)
class SpeculativeConfig:
    """How next tokens are guessed; vLLM's names.

    Attributes:
        num_speculative_tokens: The most tokens that are guessed for a sequence in a step.
        method: "ngram": what followed the longest earlier place of prompt and output that equals the last tokens.
            "draft_model": what a smaller model of the same tokenizer generates.
        prompt_lookup_max, prompt_lookup_min: Of "ngram", the most and the fewest tokens that must be equal.
        model: Of "draft_model", its folder, GGUF file or name of the hub.
        quantization: Of "draft_model", a format of torch_infini.weights for its weights; None: as they are stored.

    Raises:
        ValueError: For another method, or numbers that are none.

    Source: Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    num_speculative_tokens: int = 4
    method: str = "ngram"
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.method not in ("ngram", "draft_model"):
            raise ValueError(f"{_NAME}: method must be 'ngram' or 'draft_model', got {self.method!r}")
        if (self.model is not None) != (self.method == "draft_model"):
            rule = "given" if self.model is None else "left out"
            raise ValueError(f"{_NAME}: model must be {rule} for method {self.method!r}, got {self.model!r}")
        for name in ("model", "quantization"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{_NAME}: {name} must be a name or None, got {value!r}")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise ValueError(f"{_NAME}: {name} must be an integer of at least 1, got {value!r}")
        if self.num_speculative_tokens >= MAX_ROWS:
            raise ValueError(
                f"{_NAME}: num_speculative_tokens must be at most {MAX_ROWS - 1}, got {self.num_speculative_tokens}"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"{_NAME}: prompt_lookup_min must be at most prompt_lookup_max, {self.prompt_lookup_max}, got "
                f"{self.prompt_lookup_min}"
            )

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """Make one of a mapping of its fields, as vLLM's LLM takes it; ValueError for other names."""
        if isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{_NAME}: speculative_config must be a mapping or None, got {value!r}")
        known = [field.name for field in fields(cls)]
        if other := [key for key in value if key not in known]:
            raise ValueError(f"{_NAME}: keys must be {', '.join(known)}, got {other[0]!r}")
        if "num_speculative_tokens" not in value:
            raise ValueError(f"{_NAME}: num_speculative_tokens must be given, got {dict(value)!r}")
        settings = dict(value)
        if settings.get("model") is not None:
            settings["model"] = str(settings["model"])
            settings.setdefault("method", "draft_model")
        least, most = (settings.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max"))
        if isinstance(most, int) and least is None:
            settings["prompt_lookup_min"] = min(cls.prompt_lookup_min, most)
        if isinstance(least, int) and most is None:
            settings["prompt_lookup_max"] = max(cls.prompt_lookup_max, least)
        return cls(**settings)


class _History:
    """Where the runs of tokens of a sequence occurred, and how well its tokens were guessed.

    Args:
        size: Tokens of a run.
        chance: As the attribute, at first.

    Attributes:
        chance: The share of guesses that are right, of those whose guesses before them are; recent ones count more.
    """

    def __init__(self, size: int, chance: float) -> None:
        self._size, self.chance = size, chance
        # By a run of `size` tokens the index behind its last place, and by that index the one of the place before.
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []

    def drift(self) -> None:
        """Go a little back to the first chance, so that guesses will be tried again."""
        self.chance += _RETURN * (_CHANCE - self.chance)

    def place(self, tokens: list[int], most: int) -> int | None:
        """Return the index behind the earlier place that has the most tokens in common with the end, at most `most`,
        the latest of several; None if it is fewer than `size`.
        """
        size, end = self._size, len(tokens)
        if end <= size:
            return None
        while len(self._before) < end:  # of runs that end before the last token
            at = len(self._before)
            run = tuple(tokens[at - size : at]) if at >= size else ()
            self._before.append(self._last.get(run, 0) if run else 0)
            if run:
                self._last[run] = at
        found, longest, at = None, 0, self._last.get(tuple(tokens[end - size :]), 0)
        for _ in range(_CANDIDATES):
            if not at:
                break
            common = size
            while common < min(most, at) and tokens[at - common - 1] == tokens[end - common - 1]:
                common += 1
            if common > longest:
                found, longest = at, common
            if longest >= most:
                break
            at = self._before[at]
        return found


class Times:
    """Seconds of steps by their number of rows, of which recent ones count more. The first of a number is left out: it
    is recorded.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float | None] = {}

    def knows(self, rows: int) -> bool:
        """Return whether a step of so many rows counted."""
        return self._seconds.get(rows) is not None

    def note(self, rows: int, seconds: float) -> None:
        """Note what a step took."""
        before = self._seconds.get(rows)
        if rows not in self._seconds:
            self._seconds[rows] = None
        else:
            self._seconds[rows] = seconds if before is None else before + _NEWEST * (seconds - before)

    def of(self, rows: int) -> float:
        """Return the seconds of a step of so many rows; if none counted, those of the next smaller one, or 0."""
        known = (self._seconds.get(count) for count in range(rows, 0, -1))
        return next((found for found in known if found is not None), 0.0)


class Alike(Times):
    """Steps of all numbers of rows take as long, so that every guess pays: for ranks that decide each by itself, whose
    clocks differ.
    """

    def knows(self, rows: int) -> bool:
        return True

    def of(self, rows: int) -> float:
        return 1.0


class Drafts:
    """Guesses tokens for the steps of an engine, as many as pay: by what steps of so many rows took before, and how
    often guesses were right.

    Args:
        config: How.
        blocks: The cache's blocks: guesses take free ones, and preempt nobody.
        measures: Whether the seconds of steps decide; otherwise whatever can be guessed is tried.
    """

    def __init__(self, config: SpeculativeConfig, blocks: BlockManager, measures: bool = True) -> None:
        self._config, self._blocks = config, blocks
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()
        self._times = Times() if measures else Alike()

    def added_to(self, chunks: list[ScheduledChunk], copies: SequenceOf[tuple[int, int]] = ()) -> list[ScheduledChunk]:
        """Return a step's chunks with guesses, if all of them are the newest tokens of sequences that generate.

        Args:
            chunks: The step's.
            copies: The blocks that it copies first.
        """
        if not 0 < len(chunks) < MAX_ROWS or not is_decode(chunks) or not self._times.knows(len(chunks)):
            return chunks
        guesses = [self._guess(chunk.sequence) for chunk in chunks]
        counts = self._counts(
            [(self._history(c.sequence).chance, len(g)) for c, g in zip(chunks, guesses, strict=True)]
        )
        added = []
        for chunk, guess, count in zip(chunks, guesses, counts, strict=True):
            if guess and not count:
                self._history(chunk.sequence).drift()
            draft = guess[: self._reserve(chunk.sequence, count)]
            added.append(chunk._replace(draft=tuple(draft)))
        return added

    def note(self, rows: int, seconds: float) -> None:
        """Note what a step of newest tokens and guesses took."""
        self._times.note(rows, seconds)

    def judge(self, sequence: Sequence, guessed: int, right: int) -> None:
        """Note how many of the tokens that were guessed for a sequence it generated, before one that it did not."""
        history = self._history(sequence)
        for was_right in [True] * right + [False] * (right < guessed):
            history.chance += _NEWEST * (was_right - history.chance)

    def _history(self, sequence: Sequence) -> _History:
        found = self._histories.get(sequence)
        if found is None:
            found = self._histories[sequence] = _History(self._config.prompt_lookup_min, _CHANCE)
        return found

    def _guess(self, sequence: Sequence) -> list[int]:
        request, tokens, config = sequence.request, sequence.tokens, self._config
        if not takes_guesses(sequence):
            return []
        most = min(config.num_speculative_tokens, request.limit - len(tokens) - 1)
        at = self._history(sequence).place(tokens, config.prompt_lookup_max) if most > 0 else None
        draft: list[int] = []
        for i in range(at, at + most) if at is not None else ():
            # Behind the end the guess itself goes on: a text that repeats itself.
            draft.append(tokens[i] if i < len(tokens) else draft[i - len(tokens)])
        return draft

    def _counts(self, guesses: Iterable[tuple[float, int]]) -> list[int]:
        """Return how many tokens of each guess to compute, by (chance, tokens): those with the most tokens a second."""
        guesses = list(guesses)
        rows, counts = len(guesses), [0] * len(guesses)
        gains = [(chance**j, i) for i, (chance, most) in enumerate(guesses) for j in range(1, most + 1)]
        gains.sort(key=lambda one: -one[0])
        best, expected, pay = rows / self._times.of(rows), float(rows), 0
        for number, (gain, _) in enumerate(gains[: max(MAX_ROWS - rows, 0)], 1):
            expected += gain
            if (rate := expected / self._times.of(rows + number)) > best:
                best, pay = rate, number
        for _, i in gains[:pay]:
            counts[i] += 1
        return counts

    def _reserve(self, sequence: Sequence, count: int) -> int:
        """Allocate free blocks for tokens behind the newest; return for how many there are blocks."""
        blocks, size, end = sequence.blocks, self._blocks.block_size, len(sequence.tokens)
        while len(blocks) < self._blocks.needed(end + count) and self._blocks.free:
            blocks.append(self._blocks.allocate())
        return min(count, len(blocks) * size - end)


def is_decode(chunks: Iterable[ScheduledChunk]) -> bool:
    """Return whether all chunks of a step are newest tokens."""
    return all(chunk.num_tokens == 1 and chunk.start + 1 == len(chunk.sequence.tokens) for chunk in chunks)


def takes_guesses(sequence: Sequence) -> bool:
    """Return whether a sequence generates, and its settings follow from its tokens alone."""
    return sequence.generated > 0 and sequence.row.matcher is None and not sequence.request.params.logits_processors
