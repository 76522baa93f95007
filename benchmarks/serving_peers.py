"""torch_infini's server beside others: llama.cpp's, vLLM's, and OpenVINO GenAI behind a minimal one.

    python benchmarks/serving_peers.py --threads 2        # results/CPU/serving-peers.csv; 12 minutes at most

The same Llamas of random weights in bfloat16, the same prompts of 16 tokens and 64 tokens for each, from streaming
clients on the same CPU. Servers are started one after the other and take turns in every round; all but one are stopped
(SIGSTOP). `--threads 1 --rounds 2 --resume` leaves one of two cores to the clients, and adds that to the file.

The others are installed in build/peers at the first run: llama-server is compiled (10 minutes), and vLLM takes 5 GB.
tokens_per_s are output tokens, ttft and itl medians of a round's, and all of them medians over rounds. infini_ratio is
torch_infini's rate over this server's in the same rounds; in its own row that to the best other one. A server that
cannot be installed, fails, or makes another number of tokens has a note instead.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import harness
from harness import Results
from peers.engines import Failure
from peers.servers import MODEL, SERVERS, Running
from serving import OUTPUT, PROMPT, Figures, checkpoint, free_port, over_http

from torch_infini.commands.load.prompts import random_prompts
from torch_infini.testing.shapes import LLAMAS

OURS = "torch_infini"
WARM_UP = 16  # tokens of the round that does not count
COLUMNS = "shape clients threads server version tokens_per_s infini_ratio ttft_ms itl_ms rounds note"


class Bench:
    """One run: the options, and where results go."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results

    def run(self) -> None:
        for threads in self.options.threads:
            for shape in self.options.shapes:
                if not self.has(shape, threads):
                    with ExitStack() as stack:
                        self.measure(shape, threads, stack)

    def has(self, shape: str, threads: int) -> bool:
        """Whether the file that is resumed has all rows of a shape."""
        cases = [(clients, name) for clients in self.options.clients for name in self.options.peers]
        return all(self.results.has(shape=shape, clients=c, threads=threads, server=name) for c, name in cases)

    def measure(self, shape: str, threads: int, stack: ExitStack) -> None:
        """All numbers of clients, by all servers."""
        failures: dict[str, str] = {}
        running: list[Running] = []
        folder: Path = self.options.folder
        for name in self.options.peers:
            try:
                one = Running(name, checkpoint(shape), free_port(), threads, folder, self.options.patience)
            except Failure as failure:
                failures[name] = str(failure)
                continue
            print(f"{name} answers after {one.seconds:.0f} s", flush=True)
            running.append(stack.enter_context(closing(one)))
            one.pause()
        found: dict[tuple[int, str], list[Figures]] = {}
        for turn in range(self.options.rounds + 1):
            for clients in self.options.clients:
                for i in range(len(running)):
                    one = running[(i + turn) % len(running)]
                    if one.name in failures:
                        continue
                    one.go_on()
                    try:
                        figures = self.asked(one, shape, clients, turn)
                    except Failure as failure:
                        failures[one.name] = str(failure)
                    else:
                        found.setdefault((clients, one.name), []).extend([figures] if turn else [])
                    one.pause()
        for clients in self.options.clients:
            rounds = {name: found.get((clients, name), []) for name in self.options.peers if name not in failures}
            for name in self.options.peers:
                row = {"shape": shape, "clients": clients, "threads": threads, "server": name}
                row |= {"version": SERVERS[name].version, "rounds": self.options.rounds}
                self.results.add({**row, **({"note": failures[name]} if name in failures else summed_up(name, rounds))})

    def asked(self, one: Running, shape: str, clients: int, turn: int) -> Figures:
        """What a round of clients measures."""
        output = OUTPUT if turn else min(OUTPUT, WARM_UP)
        seed = turn * 1000 + clients
        prompts = random_prompts(clients, PROMPT, output, seed, int(LLAMAS[shape]["vocab_size"]))
        return over_http(one.url, prompts, MODEL, one.server.fields)


def summed_up(name: str, rounds: dict[str, list[Figures]]) -> Figures:
    """The medians of a server, and what torch_infini's rate is to its."""
    figures = {key: statistics.median(one[key] for one in rounds[name]) for key in rounds[name][0]}
    others = {other: each for other, each in rounds.items() if other != OURS and name in (OURS, other)}
    if OURS in rounds and others:
        best = [max(one["tokens_per_s"] for one in turn) for turn in zip(*others.values(), strict=True)]
        ratios = [ours["tokens_per_s"] / rate for ours, rate in zip(rounds[OURS], best, strict=True)]
        figures["infini_ratio"] = statistics.median(ratios)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(
        __doc__, "serving-peers.csv", threads=[2], rounds=3, quick="a tiny model, few clients and one round"
    )
    some = harness.names
    parser.add_argument("--shapes", type=some("shape", [*LLAMAS]), default=["160M", "1.1B"], help="default: 160M,1.1B")
    parser.add_argument("--clients", type=harness.counts, default=[1, 8, 32], help="at once (default: 1,8,32)")
    others = [name for name in SERVERS if name != OURS]
    parser.add_argument("--peers", type=some("server", others), default=others, help=f"default: {','.join(others)}")
    parser.add_argument("--folder", type=Path, default=harness.MODELS, help="environments and logs (build/peers)")
    parser.add_argument("--patience", type=float, default=900, help="seconds until a server answers (default: 900)")
    options = parser.parse_args(argv)
    options.peers = [OURS, *options.peers]
    if options.quick:
        options.shapes, options.clients, options.rounds = ["tiny"], [1, 4], 1
    with Results(options.out, COLUMNS, resume=options.resume) as results:
        Bench(options, results).run()


if __name__ == "__main__":
    main()
