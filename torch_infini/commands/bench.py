"""bench: latency and throughput of a model in the engine, as CSV: a single request, and many at once; of a server.

In the engine prompts are random tokens, and outputs have a fixed length; every line states the share of the memory
bandwidth. bench_server.py has --server.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from .bench_server import add_server_arguments, check_options, run_server
from .errors import CommandError
from .model import add_model_arguments, load

if TYPE_CHECKING:
    from ..engine import LLM

HELP = "measure latency and throughput of a model in the engine, as CSV, or of a server"
REQUESTS, ROUNDS = "1,8,32", 3

FIELDS = (
    "requests",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "output_tokens_per_second",
    "total_tokens_per_second",
    "first_token_ms_median",
    "first_token_ms_p99",
    "token_ms_median",
    "share_of_bandwidth",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--requests",
        metavar="N[,N]",
        help=f"how many at once, by commas (default: {REQUESTS}); of a server, how many in all (default: 100)",
    )
    parser.add_argument(
        "--prompt-tokens", "--input-len", type=int, default=128, metavar="N", help="of random prompts (default: 128)"
    )
    parser.add_argument("--output-tokens", "--output-len", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"the median of so many counts (default: {ROUNDS})")
    parser.add_argument(
        "--csv", metavar="FILE", help="where the lines go (default: stdout); of a server, a row for each request"
    )
    add_server_arguments(parser)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    from .._core.bandwidth import read_bandwidth

    check_options(arguments, arguments.parser)
    rounds = ROUNDS if arguments.rounds is None else arguments.rounds
    sizes = {"prompt-tokens": arguments.prompt_tokens, "output-tokens": arguments.output_tokens, "rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}")
    if arguments.server is not None:
        return run_server(arguments)
    requests = REQUESTS if arguments.requests is None else arguments.requests
    try:
        loads = [int(part) for part in requests.split(",")]
    except ValueError:
        loads = []
    if not loads or min(loads) < 1:
        raise CommandError(f"--requests must be positive integers with commas between, got {requests!r}")
    length = arguments.prompt_tokens + arguments.output_tokens
    llm = load(arguments, max_num_seqs=max(loads), enable_prefix_caching=False)
    if length > llm.engine.max_model_len:
        raise CommandError(
            f"--prompt-tokens and --output-tokens must be at most {llm.engine.max_model_len} together, got {length}"
        )
    lines = []
    for requests in loads:
        measured = [measure(llm, arguments, requests) for _ in range(rounds + 1)][1:]  # the first warms up
        measured.sort(key=lambda line: line["seconds"])
        lines.append(measured[len(measured) // 2])
    bandwidth = read_bandwidth() if arguments.device == "cpu" else None
    with open(arguments.csv, "w", newline="") if arguments.csv else nullcontext(sys.stdout) as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            read = line.pop("bytes_read")
            share = f"{read / line['seconds'] / bandwidth:.4g}" if bandwidth else ""
            shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()}
            writer.writerow({**shown, "share_of_bandwidth": share})
    return 0


def measure(llm: LLM, arguments: argparse.Namespace, requests: int) -> dict[str, float]:
    """Run one round with this many simultaneous requests."""
    import torch

    from ..engine import SamplingParams

    generator = torch.Generator().manual_seed(requests)
    shape = (requests, arguments.prompt_tokens)
    prompts = torch.randint(llm.engine.model.config.vocab_size, shape, generator=generator).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arguments.output_tokens)
    before = llm.metrics().bytes_read
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    first, token = [], []
    for output in outputs:
        assert output.metrics.time is not None and output.metrics.time_to_first_token is not None
        first.append(1e3 * output.metrics.time_to_first_token)
        token.append(
            1e3 * (output.metrics.time - output.metrics.time_to_first_token) / max(arguments.output_tokens - 1, 1)
        )
    first.sort()
    tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "requests": requests,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + requests * arguments.prompt_tokens) / seconds,
        "first_token_ms_median": statistics.median(first),
        "first_token_ms_p99": first[min(len(first) - 1, int(0.99 * len(first)))],
        "token_ms_median": statistics.median(token),
        "bytes_read": llm.metrics().bytes_read - before,
    }
