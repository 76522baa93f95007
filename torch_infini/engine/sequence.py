"""Request and Sequence: what was asked for, and one of its continuations on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .blocks import ROOT
from .sampler import Row
from .sampling_params import SamplingParams
from .text import TextStream

if TYPE_CHECKING:
    from .outputs import RequestOutput


class Finish(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the model's positions or the cache's blocks
    ABORT = "abort"  # cancelled
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """A prompt and its settings.

    Attributes:
        id: Unique in its engine.
        number: Requests are served in this order.
        prompt: Its tokens.
        params: Its settings.
        text: The prompt as text, or None.
        limit: Tokens that a sequence may have, prompt included.
        seeds: One for each sample.
        sequences: One, until the prompt is computed; then params.n.
        reused: Tokens of the prompt that were in the cache.
        told: Its last output; None: there is none yet.
        arrived, first_token, finished: In seconds of time.perf_counter; None: not yet.
    """

    id: str
    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    seeds: list[int]
    text: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    reused: int = 0
    told: RequestOutput | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """A prompt and what was generated behind it.

    Attributes:
        request: Whose it is.
        index: Which of the request's samples.
        row: Settings and tokens as the sampler takes them; row.output grows.
        tokens: Prompt and output.
        computed: How many of them have keys and values in the cache.
        blocks: Their blocks, in order.
        known, identity: How many of the blocks the BlockManager knows, and the identity of the last of these.
        stream: Makes text of the output; None without a tokenizer, and before the output's first token.
        text: Of the output, what is final.
        logprobs: For each token of the output its log-probability and the most likely tokens', where asked for.
        finish, stopped_by, error: Why it ended; the token or string that ended it; what went wrong.
    """

    request: Request
    index: int
    row: Row
    tokens: list[int]
    stream: TextStream | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    known: int = 0
    identity: int = ROOT
    text: str = ""
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    finish: Finish | None = None
    stopped_by: int | str | None = None
    error: str | None = None

    def restart(self) -> None:
        """Keep the tokens, and drop all that follows from them: an interrupt may have left it half changed."""
        self.blocks, self.computed, self.known, self.identity = [], 0, 0, ROOT
        self.row = Row(self.row.params, self.row.seed, self.row.prompt, self.output, self.row.eos_token_ids)
        del self.logprobs[self.generated :]
        self.stream, self.text = None, ""

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def generated(self) -> int:
        """Tokens of the output."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def samples(self) -> int:
        """How many sequences it is going to be: as many as samples are asked for, until its prompt is computed."""
        request = self.request
        return request.params.n if len(request.sequences) < request.params.n else 1

    @property
    def remaining(self) -> int:
        """Tokens that are still to be computed before the next can be sampled."""
        return len(self.tokens) - self.computed
