"""bench --server: measures a server with OpenAI's interface under a load of requests, over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CommandError

if TYPE_CHECKING:
    from .load.client import Target
    from .load.prompts import Prompt

REQUESTS = 100  # where neither --requests nor --prompts says how many
TIMEOUT = 600.0  # seconds
PACKAGE = "torch_infini[bench]"

# Options of bench that have no meaning for a server, and those that have none without.
OF_ENGINE = (
    "quantization",
    "activations",
    "kv_cache_dtype",
    "dtype",
    "device",
    "tensor_parallel_size",
    "speculative_config",
    "threads",
    "rounds",
)
OF_SERVER = (
    *("rate", "concurrency", "prompts", "vocab_size", "endpoint", "api_key", "seed", "ignore_eos", "body", "timeout"),
    *("objective", "plot"),
)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server, over HTTP")
    group.add_argument("--server", metavar="URL", help="measure this server with OpenAI's interface, of any make")
    group.add_argument("--rate", metavar="R", help="requests a second, at random times (default: inf, all at once)")
    group.add_argument("--concurrency", type=int, metavar="N", help="N requests at a time instead of a rate")
    group.add_argument(
        "--prompts", metavar="FILE", help="a text a line, or .jsonl: prompt or messages (default: random words)"
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="random prompts are token ids below N (completions alone)"
    )
    group.add_argument("--endpoint", choices=("chat", "completions"), help="default: completions")
    group.add_argument("--api-key", metavar="KEY", help="default: INFINI_API_KEY of the environment, if set")
    group.add_argument("--seed", type=int, metavar="N", help="of random prompts and times (default: 0)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="outputs have all of --output-tokens (default: with random prompts)",
    )
    group.add_argument("--body", metavar="JSON", help='further fields of requests, as {"temperature": 0.7}; it is 0')
    group.add_argument("--timeout", type=float, metavar="SECONDS", help=f"of a request (default: {TIMEOUT:g})")
    group.add_argument("--objective", metavar="TIMES", help="ttft=200ms,itl=50ms,e2e=2s: count requests that meet it")
    group.add_argument("--plot", metavar="FILE", help="draw the times, as .svg or .png")


def check_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise CommandError for an option that has no meaning with, or without, --server."""
    unfit, rule = (OF_SERVER, "without") if arguments.server is None else (OF_ENGINE, "with")
    for name in unfit:
        value = getattr(arguments, name)
        if value != parser.get_default(name):
            raise CommandError(f"--{name.replace('_', '-')} must be left out {rule} --server, got {value!r}")


def run_server(arguments: argparse.Namespace) -> int:
    """Measure a server, and report; 1 if a request failed."""
    try:
        from .load import plot
        from .load.client import Target, interface_of
        from .load.report import text_of, write_csv
        from .load.results import objective_of
        from .load.schedule import run_load
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise CommandError(f"--server needs aiohttp: pip install '{PACKAGE}'") from error
    endpoint = arguments.endpoint or "completions"
    rate = rate_of(arguments)
    objective = None if arguments.objective is None else objective_of(arguments.objective)
    timeout = TIMEOUT if arguments.timeout is None else arguments.timeout
    if not 0 < timeout < math.inf:
        raise CommandError(f"--timeout must be a number of seconds above 0, got {timeout:g}")
    if arguments.plot is not None:
        plot.check(arguments.plot)
    for name in ("csv", "plot"):  # before the load, not after it
        path = getattr(arguments, name)
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise CommandError(f"--{name} must be a file in a folder that exists, got {path}")
    key = os.environ.get("INFINI_API_KEY") if arguments.api_key is None else arguments.api_key
    fields = fields_of(arguments)
    target = Target(interface_of(arguments.server), endpoint, arguments.model or "", key or None, fields)
    prompts = prompts_of(arguments, endpoint)
    load = run_load(
        target,
        prompts,
        rate=rate,
        concurrency=arguments.concurrency,
        seed=arguments.seed or 0,
        timeout=timeout,
        objective=objective,
    )
    target, summary = asyncio.run(load)
    print(heading(target, prompts, rate, arguments), text_of(summary), sep="", end="")
    if arguments.csv is not None:
        write_csv(summary, arguments.csv)
    if arguments.plot is not None:
        plot.write(summary, arguments.plot)
    return 0 if len(summary.succeeded) == len(summary.results) else 1


def rate_of(arguments: argparse.Namespace) -> float:
    """Return requests a second; CommandError for what is no rate, or one beside --concurrency."""
    if arguments.concurrency is not None:
        if arguments.concurrency < 1:
            raise CommandError(f"--concurrency must be at least 1, got {arguments.concurrency}")
        if arguments.rate is not None:
            raise CommandError(f"--rate must be left out with --concurrency, got {arguments.rate}")
    try:
        rate = math.inf if arguments.rate is None else float(arguments.rate)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise CommandError(f"--rate must be a number of requests a second above 0, or inf, got {arguments.rate!r}")
    return rate


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all requests have besides the prompt's; CommandError if --body is no object."""
    ignores = arguments.prompts is None if arguments.ignore_eos is None else arguments.ignore_eos
    fields: dict[str, Any] = {"temperature": 0.0, **({"ignore_eos": True} if ignores else {})}
    if arguments.body is None:
        return fields
    try:
        more = json.loads(arguments.body)
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise CommandError(f"--body must be a JSON object, got {arguments.body!r}")
    if more.get("stream", True) is not True:
        raise CommandError(f"--body must leave stream out, because times are those of a stream, got {arguments.body!r}")
    return fields | more


def prompts_of(arguments: argparse.Namespace, endpoint: str) -> list[Prompt]:
    """Return a prompt for each request; CommandError for options that give none."""
    from .load.prompts import random_prompts, read_prompts, repeated

    count = None
    if arguments.requests is not None:
        count = int(arguments.requests) if arguments.requests.isascii() and arguments.requests.isdigit() else 0
        if count < 1:
            raise CommandError(f"--requests must be a positive integer with --server, got {arguments.requests!r}")
    vocabulary = arguments.vocab_size
    if vocabulary is not None:
        if endpoint == "chat" or arguments.prompts is not None:
            other = "--endpoint chat, whose prompts are texts" if endpoint == "chat" else "--prompts"
            raise CommandError(f"--vocab-size must be left out with {other}, got {vocabulary}")
        if vocabulary < 1:
            raise CommandError(f"--vocab-size must be at least 1, got {vocabulary}")
    if arguments.prompts is not None:
        read = read_prompts(arguments.prompts, endpoint, arguments.output_tokens)
        return repeated(read, count or len(read))
    sizes = arguments.prompt_tokens, arguments.output_tokens
    return random_prompts(count or REQUESTS, *sizes, arguments.seed or 0, vocabulary)


def heading(target: Target, prompts: Sequence[Prompt], rate: float, arguments: argparse.Namespace) -> str:
    """Return the line that says what was measured."""
    pace = "all at once" if math.isinf(rate) else f"{rate:g} requests/s, Poisson"
    if arguments.concurrency is not None:
        pace = f"{arguments.concurrency} at a time"
    kind = "tokens" if arguments.vocab_size is not None else "words"
    given = arguments.prompts or f"{arguments.prompt_tokens} random {kind}"
    made = f"at most {max(prompt.output_tokens for prompt in prompts)} output tokens"
    return f"{target.model} at {target.path}: {given}, {made}, {pace}, seed {arguments.seed or 0}\n"
