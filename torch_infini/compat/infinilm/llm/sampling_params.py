"""SamplingParams in InfiniLM's form: positional, with its defaults, mutable and with clone().

They are converted to torch_infini.SamplingParams, which validates them, at creation and when a request is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any

from .... import engine

_NAME = "infinilm.llm.SamplingParams"


@dataclass
class SamplingParams:
    """How the tokens of a request are chosen and when they end.

    The defaults are InfiniLM's: top_k 1 always takes the most likely token.

    Args:
        temperature: The divisor of logits; 0: always the most likely token.
        top_p: Draw among the most likely tokens that hold this share of the probability, from 0 to 1.
        top_k: Draw among this many most likely tokens; 0: no limit.
        max_tokens: The most tokens of the output; None: the engine's max_tokens.
        stop: A string or strings that end the output at their first occurrence.
        stop_token_ids: Tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: Whether end-of-sequence tokens are treated like all others.
        n, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, logit_bias, logprobs, min_tokens,
        include_stop_str_in_output: As in torch_infini.SamplingParams.

    Raises:
        ValueError: For a value that torch_infini.SamplingParams rejects, also when a request is added, because
            attributes can be set until then.
    """

    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 1
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    _: KW_ONLY
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.resolve(None)

    @classmethod
    def greedy(cls, **more: Any) -> SamplingParams:
        """Make parameters for greedy sampling.

        Args:
            **more: Other arguments of SamplingParams.
        """
        return cls(temperature=0.0, **more)

    def clone(self) -> SamplingParams:
        """Return a copy whose attributes can be set."""
        return copy(self)

    def resolve(self, max_tokens: int | None) -> engine.SamplingParams:
        """Return the engine's SamplingParams.

        Args:
            max_tokens: Used if self.max_tokens is None.

        Raises:
            ValueError: For a value that torch_infini.SamplingParams rejects.
        """
        values = dict(vars(self))
        for name in ("stop", "stop_token_ids"):
            values[name] = () if values[name] is None else values[name]
        if values["max_tokens"] is None:
            values["max_tokens"] = max_tokens
        return engine.SamplingParams(**values)


def resolved(params: Any, default: SamplingParams) -> engine.SamplingParams:
    """Return the engine's SamplingParams of a request.

    Args:
        params: SamplingParams of either kind; None: `default`.
        default: Its max_tokens also ends requests whose SamplingParams have none.

    Raises:
        ValueError: For anything else.
    """
    if params is None:
        params = default
    if isinstance(params, engine.SamplingParams):
        return params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{_NAME}: sampling_params must be SamplingParams or None, got {params!r}")
    return params.resolve(default.max_tokens)
