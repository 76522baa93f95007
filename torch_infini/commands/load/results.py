"""Result: what one request took; Objective: what it should take; Summary: figures of all requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CommandError

TIMES = ("ttft", "itl", "tpot", "e2e")
PERCENTS = (50, 90, 99)
UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}  # in a second


class Failure(NamedTuple):
    """Why a request failed.

    Attributes:
        kind: A few words, equal for failures that are counted together.
        message: One sentence.
    """

    kind: str
    message: str


@dataclass
class Result:
    """What one request took; times in seconds.

    Attributes:
        number: The request's number, from 0.
        start: When it was sent, from the beginning of the load.
        late: How long after its arrival it was sent, because this program was busy.
        ttft: Until the first chunk with text; None: there was none.
        gaps: Between chunks with text.
        e2e: Until the end of the stream.
        input_tokens, output_tokens: By the server's count (usage); if it has none, chunks with text, and None.
        finish_reason: The server's.
        failure: None: it succeeded.
    """

    number: int
    start: float = 0.0
    late: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    e2e: float = 0.0
    input_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def itl(self) -> float | None:
        """The mean of the gaps; None without one."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.gaps and self.output_tokens > 1 else None


@dataclass(frozen=True)
class Objective:
    """The most that times of a request may be, in seconds, by their names in TIMES."""

    most: dict[str, float]

    def is_met(self, result: Result) -> bool:
        """Return whether a request succeeded within the limits; one without gaps has no itl or tpot to exceed."""
        if result.failure is not None:
            return False
        for name, limit in self.most.items():
            value: float | None = getattr(result, name)
            if value is None and name in ("itl", "tpot"):
                continue
            if value is None or value > limit:
                return False
        return True

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {1e3 * limit:g} ms" for name, limit in self.most.items())


def objective_of(text: str) -> Objective:
    """Read ttft=200ms,itl=50ms,e2e=2s; CommandError for another form."""
    most: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", part)
        if found is None or found[1] not in TIMES or found[1] in most:
            form = f"times by commas, each of {', '.join(TIMES)} at most once with us, ms or s, as ttft=200ms"
            raise CommandError(f"--objective must be {form}, got {text!r}")
        most[found[1]] = float(found[2]) / UNITS[found[3]]
    return Objective(most)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, interpolated linearly; NaN of none."""
    if not values:
        return math.nan
    at = (len(values) - 1) * percent / 100
    low = math.floor(at)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (at - low)


class Spread(NamedTuple):
    """Mean and PERCENTS of a time, in seconds."""

    mean: float
    percentiles: tuple[float, ...]


def spread_of(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else math.nan
    return Spread(mean, tuple(percentile(ordered, percent) for percent in PERCENTS))


@dataclass(frozen=True)
class Summary:
    """Figures of a load.

    Attributes:
        results: All requests.
        seconds: From the first request to the end of the last.
        objective: None: none.
    """

    results: list[Result]
    seconds: float
    objective: Objective | None = None

    @property
    def succeeded(self) -> list[Result]:
        """The requests that did not fail: figures are of these."""
        return [result for result in self.results if result.failure is None]

    @property
    def met(self) -> int:
        """The number of requests that meet the objective."""
        return 0 if self.objective is None else sum(map(self.objective.is_met, self.results))

    @property
    def tokens(self) -> tuple[int, int]:
        """Input and output tokens."""
        done = self.succeeded
        return sum(result.input_tokens or 0 for result in done), sum(result.output_tokens for result in done)

    def times(self, name: str) -> list[float]:
        """Return all values of a time in TIMES; those of itl are the gaps of all requests."""
        done = self.succeeded
        if name == "itl":
            return [gap for result in done for gap in result.gaps]
        values: list[float | None] = [getattr(result, name) for result in done]
        return [value for value in values if value is not None]

    def failures(self) -> dict[str, tuple[int, str]]:
        """Return the number of failures of each kind, and the sentence of the first one; most frequent first."""
        found: dict[str, tuple[int, str]] = {}
        for result in self.results:
            if result.failure is not None:
                kind, message = result.failure
                count, first = found.get(kind, (0, message))
                found[kind] = count + 1, first
        return dict(sorted(found.items(), key=lambda item: -item[1][0]))

    def rate(self, count: float) -> float:
        """Return a count per second of the load."""
        return count / self.seconds if self.seconds > 0 else 0.0
