"""What the engine returns: RequestOutput with a Completion for each sample, and Metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Finish(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the model's positions or the cache's blocks
    ABORT = "abort"  # cancelled
    ERROR = "error"


@dataclass(frozen=True)
class Completion:
    """One sample of a request, so far.

    Attributes:
        index: Of the sample, 0 to params.n - 1.
        text: Without a tail that may become part of a stop string; "" without a tokenizer.
        new_text: The text that the last step added.
        tokens: Token ids; an end or stop token is the last of them.
        text_tokens: How many of the tokens have a part in the text: not those of a stop string, or of what may be one.
        new_tokens: The tokens that the last step added.
        logprobs: For each token (its log-probability, the most likely tokens and theirs); None if not requested.
        finish: "stop", "length", "abort" or "error"; None: not finished.
        stopped_by: The token or string that stopped it.
        error: The error message, if finish is "error".
    """

    index: int
    text: str
    new_text: str
    tokens: list[int]
    new_tokens: list[int]
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    finish: str | None = None
    stopped_by: int | str | None = None
    error: str | None = None
    text_tokens: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The output of a request, so far.

    Attributes:
        id: The request's.
        prompt: Its text; None if it came as token ids.
        prompt_tokens: Its tokens.
        completions: One for each sample; before the prompt is computed one without tokens.
        reused: The number of the prompt's tokens that were in the cache.
        time_to_first_token: Seconds since the request was added; None: no token yet.
        time: Seconds from when the request was added until it finished; None: not finished.
    """

    id: str
    prompt: str | None
    prompt_tokens: list[int]
    completions: list[Completion]
    reused: int = 0
    time_to_first_token: float | None = None
    time: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(completion.finish is not None for completion in self.completions)

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens of all completions, finished completions); each output of a request has more than the one before."""
        return sum(len(c.tokens) for c in self.completions), sum(c.finish is not None for c in self.completions)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first completion."""
        return self.completions[0].tokens


@dataclass
class Metrics:
    """The state of an engine and its counts since it was made.

    Attributes:
        waiting, running: Sequences.
        blocks, free_blocks, kept_blocks: Of the cache; kept blocks are free, but their tokens may be reused.
        steps: Forward passes.
        requests: Finished sequences, by how they finished.
        prompt_tokens: Computed prompt tokens; reused_tokens were in the cache.
        generated_tokens: Sampled tokens.
        preemptions: How often a sequence was preempted.
        seconds: Time in steps.
        bytes_read: The least number of bytes that the steps had to read: weights, keys and values.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    free_blocks: int = 0
    kept_blocks: int = 0
    steps: int = 0
    requests: dict[str, int] = field(default_factory=lambda: {finish.value: 0 for finish in Finish})
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    bytes_read: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of time in steps."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def share_of(self, bandwidth: float) -> float:
        """Return the steps' share of a memory bandwidth in bytes per second; 1 is the limit."""
        return self.bytes_read / self.seconds / bandwidth if self.seconds else 0.0
