"""The engine's results: RequestOutput with a CompletionOutput for each sample, named as in vLLM; Metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor


class Finish(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the model's positions or the cache's blocks
    ABORT = "abort"  # cancelled
    ERROR = "error"


class Logprob(NamedTuple):
    """The log-probability of a token, before temperature.

    Attributes:
        logprob: Natural logarithm.
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position of a sequence.

    Attributes:
        token: The token at this position.
        logprob: Its log-probability.
        rank: Its rank, from 1.
        top: (token, log-probability) of the likeliest tokens in descending order.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]

    def by_token(self, tokenizer: Any) -> dict[int, Logprob]:
        """Return the Logprobs of the likeliest tokens and of the token itself, by token, as vLLM does."""

        def entry(token: int, logprob: float, rank: int) -> Logprob:
            return Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token]))

        found = {token: entry(token, logprob, rank) for rank, (token, logprob) in enumerate(self.top, 1)}
        found.setdefault(self.token, entry(self.token, self.logprob, self.rank))
        return found


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request, so far.

    Attributes:
        index: The sample's index, 0 to params.n - 1.
        text: The text without a tail that may become part of a stop string; "" without a tokenizer. With output_kind
            DELTA, only the new text.
        token_ids: The tokens, including an end or stop token. With output_kind DELTA, only the new ones.
        finish_reason: "stop", "length", "abort" or "error"; None: not finished.
        stop_reason: The stop token or string that ended it; None also for an end-of-sequence token.
        new_text: The text that the last step added.
        new_token_ids: The tokens that the last step added.
        error: The error message, if finish_reason is "error".
        text_tokens: The number of tokens that contribute to the text: those of a (possible) stop string do not.
        token_logprobs: The TokenLogprobs of each token; None if not requested.
        tokenizer: Decodes the tokens of `logprobs`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    new_text: str = ""
    new_token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    text_tokens: int = 0
    token_logprobs: list[TokenLogprobs] | None = None
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token a dict of the likeliest tokens and the token itself, as in vLLM; None if not requested."""
        if self.token_logprobs is None:
            return None
        return [one.by_token(self.tokenizer) for one in self.token_logprobs]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if not requested."""
        return None if self.token_logprobs is None else sum(one.logprob for one in self.token_logprobs)

    def finished(self) -> bool:
        """Return whether the sample has ended."""
        return self.finish_reason is not None


class RequestOutputKind(Enum):
    """What the outputs of a stream hold."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, when the request is finished


class RequestMetrics(NamedTuple):
    """Times of a request, in seconds since it was added; None: not yet.

    Attributes:
        time_to_first_token: Until its first token.
        time: Until it finished.
    """

    time_to_first_token: float | None
    time: float | None


@dataclass(frozen=True)
class RequestOutput:
    """The output of a request, so far.

    Attributes:
        request_id: The request's.
        prompt: The prompt's text; None if it was given as token ids.
        prompt_token_ids: The prompt's tokens.
        outputs: One for each sample; before the prompt is computed, one without tokens.
        num_cached_tokens: How many of the prompt's tokens were in the cache.
        metrics: The request's times.
        prompt_token_logprobs: Of each prompt token except the first; None if not requested.
        lora_request: The request's adapter, or None.
        pooled: The vector of a finished request with pooling; None: it generates.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    metrics: RequestMetrics = RequestMetrics(None, None)
    prompt_token_logprobs: list[TokenLogprobs] | None = None
    lora_request: Any = None
    pooled: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return None not in [output.finish_reason for output in self.outputs]  # no generator: asked with every token

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens of all samples, finished samples); each output of a request has more than the one before."""
        return sum(len(one.token_ids) for one in self.outputs), sum(one.finished() for one in self.outputs)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each prompt token a dict as in CompletionOutput.logprobs, None for the first; None if not requested."""
        if self.prompt_token_logprobs is None:
            return None
        return [None, *(one.by_token(self.outputs[0].tokenizer) for one in self.prompt_token_logprobs)]

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first sample."""
        return self.outputs[0].token_ids


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's embedding.

    Attributes:
        embedding: Its elements.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The embedding of a request, named as in vLLM.

    Attributes:
        request_id: The request's id.
        outputs: Its embedding.
        prompt_token_ids: The prompt's tokens.
        finished: True.
        num_cached_tokens: How many of them were in the cache.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ScoringOutput:
    """How well a document answers a query.

    Attributes:
        score: From 0 to 1, unless the model's folder names another activation than the sigmoid.
    """

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of a pair of texts, named as in vLLM.

    Attributes:
        request_id: The request's id.
        outputs: The score.
        prompt_token_ids: The tokens of both texts.
        finished: True.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class ClassificationOutput:
    """The probabilities of a classifier's labels.

    Attributes:
        probs: One for each label.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """The labels of a text, named as in vLLM; the other attributes as ScoringRequestOutput's."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


def score_of(output: RequestOutput) -> ScoringRequestOutput:
    """Return the score of a finished request with ScoreParams; RuntimeError if it failed."""
    return ScoringRequestOutput(output.request_id, ScoringOutput(pooled_of(output).item()), output.prompt_token_ids)


def classes_of(output: RequestOutput) -> ClassificationRequestOutput:
    """Return the probabilities of a finished request with ScoreParams; RuntimeError if it failed."""
    probs = ClassificationOutput(pooled_of(output).tolist())
    return ClassificationRequestOutput(output.request_id, probs, output.prompt_token_ids)


def pooled_of(output: RequestOutput) -> Tensor:
    """Return the vector of a finished request with pooling; RuntimeError if it failed."""
    error = output.outputs[0].error
    if output.pooled is None or error is not None:
        raise RuntimeError(error or "torch_infini.LLM.embed: the request must be finished, got a cancelled one")
    return output.pooled


def embedding_of(output: RequestOutput) -> EmbeddingRequestOutput:
    """Return the embedding of a finished request with pooling; RuntimeError if it failed."""
    vector = EmbeddingOutput(pooled_of(output).tolist())
    return EmbeddingRequestOutput(
        output.request_id, vector, output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )


def of_kind(output: RequestOutput, kind: RequestOutputKind) -> RequestOutput | None:
    """Convert a stream's cumulative output to the given kind; None if it is to be skipped."""
    if kind is RequestOutputKind.CUMULATIVE:
        return output
    if kind is RequestOutputKind.FINAL_ONLY:
        return output if output.finished else None
    deltas = []
    for one in output.outputs:
        logprobs = one.token_logprobs and one.token_logprobs[len(one.token_ids) - len(one.new_token_ids) :]
        deltas.append(replace(one, text=one.new_text, token_ids=one.new_token_ids, token_logprobs=logprobs))
    return replace(output, outputs=deltas)


@dataclass
class Metrics:
    """The state of an engine and its counts since it was made.

    Attributes:
        waiting, running: Numbers of sequences.
        blocks, free_blocks, kept_blocks: Numbers of cache blocks; kept blocks are free, but their tokens may be reused.
        steps: Forward passes.
        requests: Finished sequences, by finish reason.
        prompt_tokens: Computed prompt tokens; reused_tokens were in the cache.
        generated_tokens: Sampled tokens.
        preemptions: How often a sequence was preempted.
        seconds: Time in steps.
        bytes_read: The least number of bytes that the steps had to read: weights, keys and values.
        draft_tokens: Tokens that were guessed, of which accepted_tokens were right.
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
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of time in steps."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def share_of(self, bandwidth: float) -> float:
        """Return the steps' share of a memory bandwidth in bytes per second; 1 is the limit."""
        return self.bytes_read / self.seconds / bandwidth if self.seconds else 0.0
