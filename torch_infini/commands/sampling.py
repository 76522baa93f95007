"""The sampling options of generate and chat."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .errors import CommandError

if TYPE_CHECKING:
    from ..engine import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int, temperature: float) -> None:
    parser.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"default: {max_new_tokens}"
    )
    of_default = "(default)" if temperature == 0 else f"(default: {temperature})"
    parser.add_argument(
        "--temperature", type=float, default=temperature, help=f"0: the most likely token always {of_default}"
    )
    parser.add_argument("--top-k", type=int, default=0, help="0: no limit (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: no limit (default)")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: no limit (default)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1: none (default)")
    parser.add_argument("--seed", type=int, help="of the random numbers (default: another each time)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end there; may be given repeatedly"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind end-of-sequence tokens")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Return the settings of the arguments; CommandError for values that SamplingParams rejects."""
    from ..engine import SamplingParams

    try:
        return SamplingParams(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            seed=arguments.seed,
            stop=tuple(arguments.stop),
            ignore_eos=arguments.ignore_eos,
            max_tokens=arguments.max_new_tokens,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
