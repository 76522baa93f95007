"""Sampler: draws the next token of every sequence of a batch by its request's SamplingParams.

One call of random_sample serves all rows; rows with penalties, biases, min_p or log-probabilities are edited one by one
first. A row's token depends on that row and its settings only.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.devices import backing_type
from ..ops import FLOATS
from .grammar import Matcher
from .sampling_params import SamplingParams

random_sample = torch.ops.infini.random_sample.default
log_softmax = torch.ops.infini.log_softmax.default

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # odd, so that its multiples are all different modulo 2^64


def resolve_seeds(params: SamplingParams, generator: torch.Generator | None = None) -> list[int]:
    """Make the seeds of a request's samples.

    Sample i has (seed + i * 0x9E3779B97F4A7C15) modulo 2^64: the first one has the request's seed itself, and random
    streams of different seeds are independent. Without a seed, one is drawn.

    Args:
        params: The request's settings.
        generator: Draws the seed; None: torch's CPU generator, seeded by the system unless torch.manual_seed was used.

    Returns:
        params.n seeds from 0 to 2^64 - 1, for Row.seed.
    """
    seed = params.seed
    if seed is None:
        high, low = torch.randint(2**32, (2,), generator=generator, device="cpu").tolist()
        seed = high << 32 | low
    return [(seed + i * GOLDEN) % WORD for i in range(params.n)]


@dataclass(slots=True, eq=False)
class Row:
    """The sampler's view of one sequence. Whether it is kept between steps or made anew, the tokens are the same.

    Attributes:
        params: The request's settings.
        seed: One of resolve_seeds(params).
        prompt: The prompt's tokens; never changed.
        output: The tokens generated so far; append only. Its length is the offset in the random stream.
        eos_token_ids: The model's end-of-sequence tokens, for min_tokens.
        bad_words: The tokens of each of params.bad_words.
        matcher: Follows the output by params.structured_outputs; None: any output.
    """

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: list[int]
    eos_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    matcher: Matcher | None = None
    # How often each token of prompt and output occurs in the first _counted tokens of the output.
    _counts: dict[int, int] | None = field(default=None, init=False, repr=False)
    _counted: int = field(default=0, init=False, repr=False)

    def counts(self) -> dict[int, int]:
        """Count each token in the output; with repetition_penalty, tokens that only the prompt has get count 0."""
        if self._counts is None:
            self._counts = dict.fromkeys(self.prompt if self.params.repetition_penalty != 1 else (), 0)
        counts = self._counts
        for token in self.output[self._counted :]:
            counts[token] = counts.get(token, 0) + 1
        self._counted = len(self.output)
        return counts

    def along(self, draft: Sequence[int]) -> list[Row]:
        """Return this row, and those of the tokens after it if the next ones are the draft's."""
        more = [[*self.output, *draft[:count]] for count in range(1, len(draft) + 1)]
        settings = self.eos_token_ids, self.bad_words
        return [self, *(Row(self.params, self.seed, self.prompt, output, *settings) for output in more)]

    def ends(self) -> set[int]:
        """Return the tokens that min_tokens forbids."""
        params = self.params
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}


class Sampled(NamedTuple):
    """A sequence's next token.

    Attributes:
        token: Its id; -1 if there is an error.
        logprob: The token's log-probability before temperature, if SamplingParams.logprobs requests it.
        top_logprobs: (token, log-probability) of the most likely tokens in descending order, equal ones by ascending
            id; fewer if fewer are possible.
        rank: 1 for the likeliest token, if there is a logprob.
        error: Why there is no token.
    """

    token: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    rank: int = 0
    error: str | None = None


class RowSettings:
    """random_sample's settings of `rows` rows as tensors, filled in one call (and on CUDA one copy)."""

    def __init__(self, rows: int, device: torch.device) -> None:
        on_cpu = backing_type(device) == "cpu"
        self.host = torch.empty(32 * rows, dtype=torch.uint8, device=device if on_cpu else "cpu", pin_memory=not on_cpu)
        self.memory = (c_char * (32 * rows)).from_address(self.host.data_ptr())
        self.pack_into = struct.Struct(f"={rows}q{rows}Q{rows}q{rows}f{rows}f").pack_into
        self.on_device = self.host if on_cpu else torch.empty_like(self.host, device=device, pin_memory=False)
        top_k, seed, offset = self.on_device[: 24 * rows].view(torch.int64).chunk(3)
        temperature, top_p = self.on_device[24 * rows :].view(torch.float32).chunk(2)
        self.tensors = (temperature, top_k, top_p, seed, offset)

    def fill(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """Return random_sample's arguments after logits. Each call overwrites the tensors of the previous one."""
        params = [row.params for row in rows]
        self.pack_into(
            self.memory,
            0,
            *[p.top_k for p in params],
            *[row.seed % WORD for row in rows],
            *[len(row.output) for row in rows],
            *[p.temperature for p in params],
            *[p.top_p for p in params],
        )
        if self.on_device is not self.host:
            self.on_device.copy_(self.host, non_blocking=True)
        return self.tensors


class Sampler:
    """Draws the next tokens of a batch. Not thread-safe."""

    def __init__(self) -> None:
        self._settings = lru_cache(maxsize=64)(RowSettings)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
        """Draw one token per row.

        In this order, in float32: logit_bias; repetition_penalty; presence_penalty and frequency_penalty; tokens that
        are not allowed, and those that cannot follow in the form of structured_outputs, are masked; end tokens are
        masked while there are fewer than min_tokens; log-probabilities are those of the distribution so far; then
        temperature, min_p, top_k, top_p, and random_sample's draw with the row's seed and, as offset, len(output).

        Args:
            logits: [n, vocabulary] float32, bfloat16 or float16; stride 1 in the last dimension. May be overwritten.
            rows: n Rows.

        Returns:
            n results. A row whose logits are NaN or +infinity somewhere, or -infinity everywhere, or whose logit_bias
            names a token that is not in the vocabulary, has an error; other rows are not affected.

        Raises:
            ValueError: If logits has another dtype, or a number of rows other than n.
            RuntimeError: For strides that are not supported.

        Source: repetition_penalty: Keskar et al., CTRL, 2019, arXiv:1909.05858; min_p: Nguyen et al., Turning Up the
            Heat: Min-p Sampling for Creative and Coherent LLM Outputs, 2024, arXiv:2407.01082; the rest as in
            random_sample.
        """
        if logits.dim() != 2 or len(rows) != logits.shape[0]:
            raise ValueError(
                f"torch_infini.Sampler: logits must have shape [{len(rows)}, vocabulary], a row for each of rows, got "
                f"{list(logits.shape)}"
            )
        if logits.dtype not in FLOATS:
            came = str(logits.dtype).removeprefix("torch.")
            raise ValueError(f"torch_infini.Sampler: logits must be float32, bfloat16 or float16, got {came}")
        if not rows:
            return []
        edited = [i for i, row in enumerate(rows) if row.params.edits_logits or len(row.output) < row.params.min_tokens]
        if edited and len(rows) > 1 and logits.stride(0) < logits.shape[1]:  # rows share memory, as for n samples
            logits = logits.contiguous()
        if not edited or logits.dtype == torch.float32:
            return self._sample(logits, rows, edited)
        # Half types would round the edits: the edited rows are sampled separately, in float32.
        results: list[Sampled] = [Sampled(-1)] * len(rows)
        others = sorted(set(range(len(rows))) - set(edited))
        for which, part in ((edited, torch.float32), (others, logits.dtype)):
            if which:
                chosen = logits[which].to(part)
                edits = range(len(which)) if which is edited else ()
                for i, result in zip(which, self._sample(chosen, [rows[i] for i in which], edits)):
                    results[i] = result
        return results

    def _sample(self, logits: Tensor, rows: Sequence[Row], edited: Sequence[int]) -> list[Sampled]:
        edits = set(edited)
        errors: dict[int, str] = {}
        logprobs: dict[int, Tensor] = {}
        for i, row in enumerate(rows):
            try:
                if i in edits and (wrong := edit(logits[i], row)):
                    errors[i] = wrong
                if row.params.logprobs is not None:
                    logprobs[i] = log_softmax(logits[i].float())
                if i in edits:
                    mask_unlikely(logits[i], row.params)
            except Exception as error:
                errors[i] = failure(error)
        tokens = draw(logits, self._settings(len(rows), logits.device).fill(rows))
        results = [Sampled(token) for token in tokens]
        for i, token in enumerate(tokens):
            if token < 0:
                errors.setdefault(i, explain(token, logits[i]))
        for i, values in logprobs.items():
            if i in errors:
                continue
            try:
                count = rows[i].params.logprobs or 0
                own = values[tokens[i]]
                rank = 1 + int((values > own).sum())
                results[i] = Sampled(tokens[i], own.item(), most_likely(values, count), rank)
            except Exception as error:
                errors[i] = failure(error)
        for i, wrong in errors.items():
            results[i] = Sampled(-1, error=wrong)
        return results


def failure(error: Exception) -> str:
    """Format an exception for a row's result; it ends that row's request only."""
    return f"torch_infini.Sampler: the row must be one that can be sampled, got {type(error).__name__}: {error}"


def edit(logits: Tensor, row: Row) -> str | None:
    """Apply bias, penalties and min_tokens to a row's logits [vocabulary], float32; return an error message or None."""
    params, size = row.params, logits.shape[0]
    if params.logit_bias:
        if (largest := max(params.logit_bias)) >= size:
            return f"torch_infini.Sampler: logit_bias must name tokens of the vocabulary, below {size}, got {largest}"
        ids = integers(params.logit_bias, logits.device)
        logits.index_add_(0, ids, logits.new_tensor(list(params.logit_bias.values())))
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        counts = row.counts()
        if counts and (max(counts) >= size or min(counts) < 0):  # a prompt may have ids that stand for an image
            counts = {token: count for token, count in counts.items() if 0 <= token < size}
        if counts:
            ids = integers(counts, logits.device)
            values = logits[ids]
            if params.repetition_penalty != 1:
                penalty = params.repetition_penalty
                values = torch.where(values > 0, values / penalty, values * penalty)
            if params.presence_penalty != 0 or params.frequency_penalty != 0:
                times = integers(counts.values(), logits.device)
                values = values - (times * params.frequency_penalty + (times > 0) * params.presence_penalty)
            logits[ids] = values
    if params.allowed_token_ids is not None:
        if (largest := max(params.allowed_token_ids)) >= size:
            return f"torch_infini.Sampler: allowed_token_ids must be below {size}, the vocabulary's size, got {largest}"
        ids = integers(params.allowed_token_ids, logits.device)
        allowed = logits[ids]
        logits.fill_(-inf)
        logits[ids] = allowed
    if forbidden := [
        word[-1]
        for word in row.bad_words
        if word[:-1] == row.output[len(row.output) - len(word) + 1 :] and word[-1] < size
    ]:
        logits[integers(forbidden, logits.device)] = -inf
    for processor in params.logits_processors:
        wrong = process(logits, row, processor)
        if wrong is not None:
            return wrong
    if row.matcher is not None and (wrong := row.matcher.apply(logits, row.output)) is not None:
        return wrong
    if len(row.output) < params.min_tokens:
        ends = [token for token in row.ends() if token < size]
        if ends:
            logits[integers(ends, logits.device)] = -inf
    return None


def ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    """Return whether tokens end with `end`, which may be empty."""
    return len(tokens) >= len(end) and list(tokens[len(tokens) - len(end) :]) == list(end)


def process(logits: Tensor, row: Row, processor: Callable[..., Any]) -> str | None:
    """Replace a row's logits by what a processor returns; return an error message or None."""
    takes_prompt = len(signature(processor).parameters) > 2
    args = (list(row.prompt), list(row.output), logits) if takes_prompt else (list(row.output), logits)
    found = processor(*args)
    if not isinstance(found, Tensor) or found.shape != logits.shape:
        came = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        return f"torch_infini.Sampler: logits_processors must return logits {list(logits.shape)}, got {came}"
    if found is not logits:
        logits.copy_(found)
    return None


def mask_unlikely(logits: Tensor, params: SamplingParams) -> None:
    """Apply min_p by p_i / p_max = exp((x_i - x_max) / temperature), without a division or a sum."""
    if params.min_p > 0 and params.temperature > 0:
        least = logits.amax() + params.temperature * log(params.min_p)
        # threshold_ replaces values up to its number, is several times as fast as a mask, and keeps NaN.
        torch.threshold_(logits, torch.nextafter(least, least.new_tensor(-inf)).item(), -inf)


def integers(values: Iterable[int], device: torch.device) -> Tensor:
    """Make a tensor [n] int64; torch.tensor takes four times as long for many integers."""
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)


def most_likely(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens in descending order, equal ones by ascending id (topk does not specify theirs)."""
    size = logprobs.shape[0]
    if count == 0:
        return []
    values, ids = logprobs.topk(min(count + 1, size))
    if count < size and values[count] == values[count - 1]:
        ids = (logprobs >= values[count]).nonzero().flatten()
        values = logprobs[ids]
    possible = [(token, value) for token, value in zip(ids.tolist(), values.tolist()) if value > -inf]
    return sorted(possible, key=lambda entry: (-entry[1], entry[0]))[:count]


def draw(logits: Tensor, settings: tuple[Tensor, ...]) -> list[int]:
    """Call random_sample; rows that cannot be sampled get a token below 0, on the CPU as on CUDA."""
    try:
        return random_sample(logits, *settings).tolist()
    except RuntimeError:
        wrong = ~(logits < inf)
        tokens = torch.where((logits == -inf).all(1), -1 - logits.shape[1], 0)
        tokens = torch.where(wrong.any(1), -1 - wrong.int().argmax(1), tokens)
        if not tokens.any():  # the values are not the cause
            raise
        good = (tokens == 0).nonzero().flatten()
        if len(good):
            tokens[good] = random_sample(logits[good], *(x[good] for x in settings))
        return tokens.tolist()


def explain(token: int, logits: Tensor) -> str:
    """Return the error message of a token below 0."""
    size = logits.shape[0]
    if token >= -size:
        value = logits[-1 - token].item()
        return f"torch_infini.Sampler: logits must have neither NaN nor +infinity, got {value} for token {-1 - token}"
    if token == -1 - size:
        return "torch_infini.Sampler: logits must leave a token to draw, got -infinity for all"
    return "torch_infini.Sampler: settings must be those of SamplingParams, got others"
