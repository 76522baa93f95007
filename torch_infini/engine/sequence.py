"""Request and Sequence: a prompt with its settings, and the state of one of its samples in the engine; their output."""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..nn import EmbeddedPrompt, RotarySwitch
from .blocks import ROOT
from .grammar import Matcher
from .outputs import CompletionOutput, Finish, RequestMetrics, RequestOutput, TokenLogprobs
from .pooling import PoolingParams
from .sampler import Row
from .sampling_params import SamplingParams
from .text import TextStream


class Adapter(Protocol):
    """An adapter that is loaded (LoadedAdapter).

    Attributes:
        request: The LoRARequest that it was loaded for.
        slot: Its slot among the model's adapters.
        root: Identity of the empty prefix of its sequences.
    """

    @property
    def request(self) -> object: ...
    @property
    def slot(self) -> int: ...
    @property
    def root(self) -> int: ...


@dataclass(eq=False)
class Request:
    """A prompt and its settings.

    Attributes:
        id: Unique in its engine.
        number: Requests are scheduled in this order.
        prompt: Its tokens.
        params: Its settings.
        text: The prompt as text, or None.
        limit: The most tokens of a sequence, prompt included.
        seeds: One for each sample.
        sequences: One until the prompt is computed, then params.n.
        reused: The number of the prompt's tokens that were in the cache.
        bad_words: The tokens of each of params.bad_words.
        matcher: The beginning of params.structured_outputs; None: any output.
        adapter: Its adapter, or None.
        switch: The model's RotarySwitch.
        pooling: How its prompt becomes a vector; None: tokens are generated.
        types: The token_type_ids of its tokens, where they are not zeros; else None.
        images: What the model's processor made of its images, until the model encodes them; None: it has none.
        embedded: The prompt with its images encoded, or None.
        keys: The prompt, with a number in the place of each token of an image that says which; None: it has none.
        pooled: What is kept of the states of its tokens; at the end the vector.
        prompt_logprobs: Of the prompt's tokens by position, if requested, as far as computed.
        last_output: The output that was returned last, or None.
        arrived, first_token, finished: Times in seconds of time.perf_counter; None: not yet.
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
    bad_words: list[list[int]] = field(default_factory=list)
    matcher: Matcher | None = None
    adapter: Adapter | None = None
    switch: RotarySwitch | None = None
    pooling: PoolingParams | None = None
    types: list[int] | None = None
    images: Mapping[str, Tensor] | None = None
    embedded: EmbeddedPrompt | None = None
    keys: list[int] | None = None
    pooled: Tensor | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    last_output: RequestOutput | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that were generated from it.

    Attributes:
        request: The request that it is a sample of.
        index: The sample's index.
        row: Settings and tokens for the sampler; row.output grows.
        tokens: Prompt and output.
        computed: The number of tokens whose keys and values are in the KV cache.
        is_long: Whether these are rotated as those of a long sequence, from the first one on.
        blocks: Their blocks, in order.
        state: Its row among the model's states; negative: it has none.
        num_cached, identity: The number of full blocks that the BlockManager has cached for reuse, and the identity of
            the last of them.
        stream: Decodes the output; None without a tokenizer, and before the output's first token.
        text: Text of the output that no later token changes.
        starts: Where in the text each token of the output begins, as far as decoded; only with stop strings.
        logprobs: Of each token of the output, if requested.
        finish, stopped_by, error: Why it finished; the token or string that stopped it; the error message.
    """

    request: Request
    index: int
    row: Row
    tokens: list[int]
    stream: TextStream | None = None
    computed: int = 0
    is_long: bool = False
    blocks: list[int] = field(default_factory=list)
    state: int = -1
    num_cached: int = 0
    identity: int = ROOT
    text: str = ""
    starts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stopped_by: int | str | None = None
    error: str | None = None

    def restart(self) -> None:
        """Reset all state but the tokens, after an interrupt that may have left it inconsistent."""
        self.blocks, self.computed, self.num_cached, self.identity = [], 0, 0, self.root
        self.state = -1
        row = self.row
        matcher = None if row.matcher is None else row.matcher.copy()
        self.row = Row(row.params, row.seed, row.prompt, self.output, row.eos_token_ids, row.bad_words, matcher)
        del self.logprobs[self.generated :]
        self.stream, self.text, self.starts = None, "", []

    @property
    def keys(self) -> list[int]:
        """Its tokens, as the prefix cache tells them apart: those of different images are different."""
        keys = self.request.keys
        return self.tokens if keys is None else [*keys, *self.output]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of tokens of the prompt that are computed together, because they see each other."""
        return () if self.request.embedded is None else self.request.embedded.spans

    @property
    def shift(self) -> int:
        """What is added to the places of the tokens that follow its prompt."""
        return 0 if self.request.embedded is None else self.request.embedded.shift

    @property
    def root(self) -> int:
        """Identity of the empty prefix: sequences with different adapters or rotations share no blocks."""
        adapter = self.request.adapter
        return 2 * (ROOT if adapter is None else adapter.root) - self.must_be_long

    @property
    def must_be_long(self) -> bool:
        """Whether its tokens must be rotated as those of a long sequence, from the first one on."""
        switch = self.request.switch
        if switch is None:
            return False
        return len(self.tokens if switch.recomputes else self.request.prompt) > switch.length

    @property
    def in_chunks(self) -> int:
        """The number of first tokens that are computed in chunks: the prompt, or what was computed anew as long."""
        prompt, switch = len(self.request.prompt), self.request.switch
        return max(prompt, switch.length + 1) if switch is not None and switch.recomputes and self.is_long else prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def generated(self) -> int:
        """The number of tokens of the output."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def text_tokens(self) -> int:
        """The number of the output's tokens that contribute to the text."""
        if not self.request.params.stop:
            return self.generated
        # A token without text of its own counts if text follows, or if no stop string ended the text.
        has_ended = self.finish is not None and not isinstance(self.stopped_by, str)
        return self.generated if has_ended else bisect_left(self.starts, len(self.text))

    @property
    def samples(self) -> int:
        """The number of sequences that this one will become: params.n until its prompt is computed, then 1."""
        request = self.request
        return request.params.n if len(request.sequences) < request.params.n else 1

    @property
    def remaining(self) -> int:
        """The number of tokens to compute before the next can be sampled."""
        return len(self.tokens) - self.computed


def output_of(request: Request, tokenizer: Any = None) -> RequestOutput:
    """Make a request's output; new text and tokens are those that request.last_output does not have.

    Args:
        request: The request.
        tokenizer: Decodes the tokens of log-probabilities.
    """
    last = request.last_output
    reported = {} if last is None else {old.index: (len(old.text), len(old.token_ids)) for old in last.outputs}
    outputs = []
    for sequence in request.sequences:
        text, tokens = sequence.text, sequence.output
        old_text, old_tokens = reported.get(sequence.index, (0, 0))
        outputs.append(
            CompletionOutput(
                sequence.index,
                text,
                tokens,
                None if sequence.finish is None else sequence.finish.value,
                sequence.stopped_by,
                text[old_text:],
                tokens[old_tokens:],
                sequence.error,
                sequence.text_tokens,
                list(sequence.logprobs) if request.params.logprobs is not None else None,
                tokenizer,
            )
        )

    def since(time: float | None) -> float | None:
        return None if time is None else time - request.arrived

    return RequestOutput(
        request.id,
        request.text,
        request.prompt,
        outputs,
        request.reused,
        RequestMetrics(since(request.first_token), since(request.finished)),
        [request.prompt_logprobs[position] for position in sorted(request.prompt_logprobs)]
        if request.params.prompt_logprobs is not None
        else None,
        None if request.adapter is None else request.adapter.request,
        request.pooled if request.pooling is not None and request.is_finished else None,
    )


def plain_ids(name: str, prompt: Iterable[Any], vocabulary: int) -> list[int]:
    """Convert token ids to plain integers; ValueError, beginning with `name`, for anything that is no token id."""
    tokens: list[int] = []
    for token in prompt:
        try:
            tokens.append(-1 if isinstance(token, bool) else operator.index(token))
        except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for several elements
            tokens.append(-1)
        if not 0 <= tokens[-1] < vocabulary:
            raise ValueError(f"{name} must be token ids from 0 to {vocabulary - 1}, got {token!r}")
    return tokens
