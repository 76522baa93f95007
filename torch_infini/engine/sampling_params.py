"""SamplingParams: how the tokens of a request are chosen and when they end.

Checked once, when they are made; the sampler and the engine rely on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from numbers import Integral, Real
from typing import Any

import torch

from .outputs import RequestOutputKind
from .structured_outputs import StructuredOutputsParams

LARGEST = torch.finfo(torch.float32).max  # the kernel takes settings as float32

LogitsProcessor = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when they end.

    In this order: logit_bias, repetition_penalty, presence_penalty and frequency_penalty, allowed_token_ids, bad_words,
    logits_processors, structured_outputs, min_tokens; log-probabilities are taken here; then temperature, min_p, top_k,
    top_p, and the draw. top_p counts the probability of all tokens that min_p left, including those beyond top_k; of
    the token that crosses top_p, only the part below it is drawn (torch.ops.infini.random_sample has the formula).

    Args:
        n: How many samples of a prompt, at least 1.
        temperature: Divides the logits; 0: always the most likely token (min_p, top_k and top_p have no effect).
        top_k: Draw among this many most likely tokens; 0 or -1: no limit.
        top_p: Draw among the most likely tokens that hold this share of the probability, from 0 to 1; 1: no limit.
        min_p: Draw among tokens with at least this share of the most likely one's probability, both after temperature;
            from 0 (no limit) to 1.
        repetition_penalty: Applied once to each token of the prompt and the output: a logit above 0 is divided by it,
            any other multiplied. Above 0; 1: none. As in transformers.
        presence_penalty: Subtracted from the logit of each token in the output. Finite; 0: none. As in OpenAI's API.
        frequency_penalty: Subtracted from the logit of each token in the output, as often as it occurs there. Finite;
            0: none. As in OpenAI's API.
        seed: Seed of the request's random numbers: any integer, taken modulo 2^64. The same seed, prompt and settings
            give the same tokens, whatever else is in the batch. None: a random one.
        logit_bias: Added to the logits of tokens; -infinity forbids a token.
        logprobs: Return the log-probability of each token and of this many most likely ones (may be 0). None: of none.
        max_tokens: The most tokens of the output, at least 1; None: as many as the model's length leaves.
        min_tokens: The number of tokens before which end-of-sequence tokens, stop tokens and stop strings do not count.
        stop: A string or strings that end the output where they first appear in it.
        stop_token_ids: Tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: Whether end-of-sequence tokens are treated like other tokens.
        include_stop_str_in_output: Whether the stop string stays at the end of the text.
        bad_words: Texts that must not be generated: the last token of one is forbidden after its other tokens. Applies
            to each text as it is and with a space before it. Needs a tokenizer.
        allowed_token_ids: The only tokens that may be drawn; None: all.
        logits_processors: Functions of (generated token ids, logits [vocabulary] float32), or of (prompt token ids,
            generated token ids, logits), that return the logits to draw from; called for each token after the
            penalties. One that raises ends the request.
        structured_outputs: The form that the text must have (StructuredOutputsParams): tokens that cannot follow are
            forbidden, end-of-sequence tokens where the form is not complete. The output ends where nothing can follow,
            also before min_tokens. Log-probabilities are those of the tokens that may follow. Needs a tokenizer and
            llguidance; ignore_eos must be False. None: any form.
        prompt_logprobs: As logprobs, for the prompt's tokens; the prompt then reuses no cached prefix. None: of none.
        detokenize: Whether the output has a text; stop must be empty if it is False.
        skip_special_tokens: Whether special tokens are left out of the text.
        spaces_between_special_tokens: Must be True, as in all tokenizers of transformers 5.
        truncate_prompt_tokens: Keep this many of the prompt's last tokens; -1: as many as the model takes. None: all.
        output_kind: What a stream's outputs hold: CUMULATIVE, everything so far; DELTA, only what is new; FINAL_ONLY,
            everything, in a single output at the end.

    Raises:
        ValueError: For a value outside the ranges above.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputsParams | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._integer("n", 1)
        self._number("temperature", 0, LARGEST, "be a finite number of at least 0")
        if self.top_k == -1 and is_integer(self.top_k):
            self._set("top_k", 0)
        self._integer("top_k", 0)
        self._number("top_p", 0, 1, "be a number from 0 to 1")
        self._number("min_p", 0, 1, "be a number from 0 to 1")
        self._number("repetition_penalty", 1 / LARGEST, LARGEST, "be a finite number above 0")
        self._number("presence_penalty", -LARGEST, LARGEST, "be a finite number")
        self._number("frequency_penalty", -LARGEST, LARGEST, "be a finite number")
        if self.seed is not None and not is_integer(self.seed):
            self._fail("seed", "be an integer or None", repr(self.seed))
        self._bias()
        if self.logprobs is not None:
            self._integer("logprobs", 0, " or None")
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, " or None")
        self._integer("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._fail("min_tokens", f"be at most max_tokens, {self.max_tokens}", self.min_tokens)
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        self._several("stop", lambda text: isinstance(text, str) and text, "be a string or strings, none of them empty")
        self._several(
            "stop_token_ids", lambda token: is_integer(token) and token >= 0, "be token ids, integers of at least 0"
        )
        self._several("bad_words", lambda text: isinstance(text, str) and text, "be strings, none of them empty")
        if self.allowed_token_ids is not None:
            self._several(
                "allowed_token_ids",
                lambda token: is_integer(token) and token >= 0,
                "be token ids of at least 0, or None",
            )
            if not self.allowed_token_ids:
                self._fail("allowed_token_ids", "be None or have a token", repr(self.allowed_token_ids))
        if self.logits_processors is None:
            self._set("logits_processors", ())
        self._several("logits_processors", callable, "be functions")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                self._fail(
                    "structured_outputs", "be StructuredOutputsParams or None", type(self.structured_outputs).__name__
                )
            if self.ignore_eos:
                self._fail("ignore_eos", "be False with structured_outputs, which end by themselves", True)
        if self.prompt_logprobs is not None:
            self._integer("prompt_logprobs", 0, " or None")
        if self.truncate_prompt_tokens not in (None, -1):
            self._integer("truncate_prompt_tokens", 1, ", -1 or None")
        if not self.detokenize and self.stop:
            self._fail("stop", "be empty where detokenize is False", repr(self.stop))
        if self.spaces_between_special_tokens is not True:
            self._fail("spaces_between_special_tokens", "be True", repr(self.spaces_between_special_tokens))
        if not isinstance(self.output_kind, RequestOutputKind):
            self._fail("output_kind", "be a RequestOutputKind", repr(self.output_kind))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                self._fail(name, "be True or False", repr(getattr(self, name)))

    @classmethod
    def greedy(cls, **more: Any) -> SamplingParams:
        """Make parameters of greedy sampling.

        Args:
            **more: Other arguments of SamplingParams.
        """
        return cls(temperature=0.0, **more)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether a row of logits is edited before random_sample (min_tokens aside)."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.logits_processors
            or self.structured_outputs is not None
            or (self.min_p > 0 and self.temperature > 0)
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _fail(self, argument: str, rule: str, came: object) -> None:
        raise ValueError(f"torch_infini.SamplingParams: {argument} must {rule}, got {came}")

    def _integer(self, name: str, least: int, otherwise: str = "") -> None:
        value = getattr(self, name)
        if not is_integer(value) or value < least:
            self._fail(name, f"be an integer of at least {least}{otherwise}", repr(value))
        if value >= 2**63:
            self._fail(name, f"be at most {2**63 - 1}, the largest integer of 64 bits", repr(value))
        self._set(name, int(value))

    def _number(self, name: str, least: float, most: float, rule: str) -> None:
        value = getattr(self, name)
        if "finite" in rule and is_number(value) and abs(value) < inf:  # finite, but not in float32
            if value > most:
                rule = f"be at most {most:g}, the largest number of float32"
            elif value < least and (least < 0 or value > 0):
                rule = f"be at least {least:g}, by the range of float32"
        if not is_number(value) or not least <= value <= most:
            self._fail(name, rule, repr(value))
        self._set(name, float(value))

    def _several(self, name: str, is_valid: Callable[[Any], object], rule: str) -> None:
        values = getattr(self, name)
        if not isinstance(values, Iterable) or not all(map(is_valid, values := tuple(values))):
            self._fail(name, rule, repr(values))
        self._set(name, values)

    def _bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            self._fail("logit_bias", "map token ids to numbers", repr(self.logit_bias))
        for token, bias in self.logit_bias.items():
            if not is_integer(token) or token < 0:
                self._fail("logit_bias", "have token ids, integers of at least 0, as keys", repr(token))
            if not is_number(bias) or not (bias == -inf or abs(bias) <= LARGEST):
                rule = f"have finite numbers of at most {LARGEST:g}, either sign, or -infinity as values"
                self._fail("logit_bias", rule, f"{bias!r} for token {token}")
        self._set("logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
