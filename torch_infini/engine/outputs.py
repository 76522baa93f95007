"""What the engine gives back: RequestOutput with a Completion for each sample, and Metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from .sequence import Finish, Request


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt, as far as it has come.

    Attributes:
        index: Which of params.n.
        text: Without what may still turn out to be part of a stop string; "" without a tokenizer.
        new_text: What the last step added to text.
        tokens: Its ids; an end or stop token is the last of them.
        new_tokens: What the last step added to tokens.
        logprobs: For each token (its log-probability, the most likely tokens and theirs); None if not asked for.
        finish: "stop", "length", "abort" or "error"; None: it goes on.
        stopped_by: The token or string that stopped it.
        error: What went wrong, in a sentence.
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


@dataclass(frozen=True)
class RequestOutput:
    """A request, as far as it has come.

    Attributes:
        id: The request's.
        prompt: Its text; None if it came as tokens.
        prompt_tokens: Its tokens.
        completions: One for each sample; before the prompt is computed one without tokens.
        reused: How many of the prompt's tokens were in the cache.
        time_to_first_token: Seconds from the request's arrival; None: there is none yet.
        time: Seconds from its arrival to its end; None: it goes on.
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
        """Tokens of all completions, and how many of these ended: more in every output than in the one before."""
        return sum(len(c.tokens) for c in self.completions), sum(c.finish is not None for c in self.completions)

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """Of the first completion."""
        return self.completions[0].tokens


def output_of(request: Request) -> RequestOutput:
    """What is to be told of a request; new is what its last output, request.told, does not have."""
    told = (
        {}
        if request.told is None
        else {old.index: (len(old.text), len(old.tokens)) for old in request.told.completions}
    )
    completions = []
    for sequence in request.sequences:
        text, tokens = sequence.text, sequence.output
        old_text, old_tokens = told.get(sequence.index, (0, 0))
        completions.append(
            Completion(
                sequence.index,
                text,
                text[old_text:],
                tokens,
                tokens[old_tokens:],
                list(sequence.logprobs) if request.params.logprobs is not None else None,
                None if sequence.finish is None else sequence.finish.value,
                sequence.stopped_by,
                sequence.error,
            )
        )
    since = lambda at: None if at is None else at - request.arrived
    return RequestOutput(
        request.id,
        request.text,
        request.prompt,
        completions,
        request.reused,
        since(request.first_token),
        since(request.finished),
    )


@dataclass
class Metrics:
    """What the engine does, now and since it began.

    Attributes:
        waiting, running: Sequences.
        blocks, free_blocks, kept_blocks: Of the cache; kept: free, but their tokens may be reused.
        steps: Forward passes.
        requests: Finished, by how they finished.
        prompt_tokens: Computed; those that were in the cache are reused_tokens.
        generated_tokens: Sampled.
        preemptions: Sequences that gave their blocks back and were computed anew.
        seconds: In steps.
        bytes_read: Weights, keys and values that the steps had to read at least.
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
        """Generated, over the time in steps."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def share_of(self, bandwidth: float) -> float:
        """Of a memory bandwidth in bytes a second, the share that the steps used: 1 is the limit."""
        return self.bytes_read / self.seconds / bandwidth if self.seconds else 0.0
