"""Generation with models of random weights, Llamas and a mixture of experts: torch as it is, compiled, packed;
llama.cpp and its fork ik_llama.cpp; OpenVINO; torch_infini.

    python benchmarks/generate.py --threads 1,2        # results/CPU/generate.csv, and a plot beside it
    python benchmarks/generate.py --peers llama.cpp,gguf --dtypes int8,int4 --out FILE    # the same files
    python benchmarks/generate.py --shapes 30B-A3B --peers llama.cpp,infini,engine    # layers of Qwen3-30B-A3B

Every engine has its own process and, where it is not of this one, its own environment (peers/engines.py), which is made
in build/peers at the first run (4 minutes each for llama.cpp and its fork: they are compiled). All of a cell take turns
in every round, and medians count. What cannot be installed or fails stands in the CSV in words. logit_error is the root
mean square of the distance from the float32 logits of the same bfloat16 weights, over theirs: the last of 48 tokens at
once, then 16 one by one. share_of_limit: of a step's time, what reading its weights takes at the measured bandwidth; of
a mixture's experts, those that a token chose, so not for batches. engine_ratio: the rate of torch_infini's engine over
this one's, in the same rounds.

Cells besides the default ones: serve, many requests at once, tokens of their outputs a second; prefix, a first token
behind a prefix that is in the cache and behind another one; read, a checkpoint's loading out of the page cache, and
reading its files as they are into fresh memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import plot
from contestants import Contestant, Contestants, add_options
from harness import Results
from peers import protocol
from peers.engines import DTYPES, PEERS, Failure, has_variant

from torch_infini._core.bandwidth import read_bandwidth
from torch_infini.testing import threads_set_to
from torch_infini.testing.shapes import FAMILIES, MIXTURES, SHAPES


@dataclass(frozen=True)
class Cell:
    """What is measured: `length` is the context of a decode, the prompt of a prefill or of generate(), a prefix;
    `batch` is sequences or requests."""

    kind: str
    length: int = 0
    dtypes: tuple[str, ...] = DTYPES
    batch: int = 1


CELLS = {
    "decode-16": Cell("decode", 16),
    "decode-2048": Cell("decode", 2048, ("bfloat16",)),
    "decode-16x8": Cell("decode", 16, ("bfloat16", "int8"), batch=8),
    "decode-16x32": Cell("decode", 16, batch=32),
    "prefill-512": Cell("prefill", 512),
    "prefill-2048": Cell("prefill", 2048, ("bfloat16",)),
    "generate": Cell("generate", 16),
    "serve-32": Cell("serve", dtypes=("bfloat16", "int8"), batch=32),
    "prefix-1024": Cell("prefix", 1024),
    "read": Cell("read"),
}
SHAPE_CELLS = {
    "1.1B": [name for name in CELLS if CELLS[name].kind in ("decode", "prefill") and CELLS[name].batch < 32],
    "160M": ["generate"],
    "tiny": list(CELLS),
    **dict.fromkeys((*MIXTURES, *FAMILIES), ["decode-16", "decode-16x8", "prefill-512"]),
}


COLUMNS = (
    "shape threads cell dtype engine version tokens_per_s seconds engine_ratio share_of_limit logit_error rounds "
    "read_gb_per_s note"
)


def label(engine: str, variant: str, dtype: str) -> str:
    """An engine's name in the CSV: with its variant where it has several for weights of this dtype."""
    return f"{engine} {variant}" if len(PEERS[engine].variants[dtype]) > 1 else engine


class Bench:
    """One run: the options, the models, what has been measured."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.models = Contestants(options.folder, options.patience)

    def arguments(self, cell: Cell, checkpoint: Path) -> dict[str, Any]:
        """Of the call that measures a cell."""
        steps = self.options.steps
        if cell.kind == "decode":
            return {"batch": cell.batch, "context": cell.length, "steps": steps}
        if cell.kind in ("prefill", "prefix"):
            return {"tokens": cell.length}
        if cell.kind == "serve":
            prompts, outputs = protocol.requests(cell.batch, protocol.vocabulary(str(checkpoint)))
            return {"prompts": prompts, "outputs": outputs}
        return {"prompt": cell.length, "steps": steps} if cell.kind == "generate" else {}

    def measure(
        self, contestants: Sequence[Contestant], cell: Cell, arguments: dict[str, Any]
    ) -> tuple[dict[str, dict[str, float] | Failure], float]:
        """(median seconds by what was timed, or why there are none, by contestant; bytes a second that torch reads).

        What a contestant times is "" where it is one thing.
        """
        times: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in contestants}
        failures: dict[str, Failure] = {}
        bandwidth = 0.0
        for turn in range(self.options.rounds + 1):
            bandwidth = max(bandwidth, read_bandwidth(0.2))
            for contestant in contestants:
                if contestant.name in failures:
                    continue
                try:
                    value = contestant.process.ask(cell.kind, **arguments)
                except Failure as failure:
                    failures[contestant.name] = failure
                    continue
                if turn:  # the first turn warms up, and compiles
                    for what, seconds in (value if isinstance(value, dict) else {"": value}).items():
                        times[contestant.name].setdefault(what, []).append(seconds)
        for contestant in contestants:
            if contestant.process.process.poll() is None:
                contestant.process.ask("release")
        medians = {name: {what: statistics.median(t) for what, t in values.items()} for name, values in times.items()}
        return medians | failures, bandwidth

    def add(self, shape: str, threads: int, name: str, dtype: str, engine: str, **values: Any) -> None:
        row = {"shape": shape, "threads": threads, "cell": name, "dtype": dtype, "engine": engine}
        self.results.add({**row, "version": "", "rounds": self.options.rounds, "note": "", **values})

    def group(self, shape: str, threads: int, dtype: str, cells: Sequence[str]) -> None:
        """All cells of a shape with weights of one dtype, by all the engines that have it."""
        checkpoint = self.models.checkpoint(shape)
        contestants: list[Contestant] = []
        try:
            for engine in self.options.peers:
                mine = [name for name in cells if CELLS[name].kind in PEERS[engine].kinds]
                for variant in PEERS[engine].variants.get(dtype, ()) if mine else ():
                    if not has_variant(variant, shape):
                        continue
                    who = label(engine, variant, dtype)
                    try:
                        contestants.append(self.models.start(engine, who, variant, checkpoint, dtype, threads))
                    except Failure as failure:
                        for name in mine:
                            self.add(shape, threads, name, dtype, who, note=str(failure))
            for name in cells:
                some = [one for one in contestants if CELLS[name].kind in PEERS[one.engine].kinds]
                self.cell(shape, threads, name, dtype, some)
        finally:
            for contestant in contestants:
                contestant.process.close()

    def cell(self, shape: str, threads: int, name: str, dtype: str, contestants: Sequence[Contestant]) -> None:
        cell = CELLS[name]
        arguments = self.arguments(cell, self.models.checkpoint(shape))
        tokens = {
            "decode": cell.batch * self.options.steps,
            "prefill": cell.length,
            "generate": self.options.steps,
            "serve": sum(arguments.get("outputs", ())),
        }.get(cell.kind)
        results, bandwidth = self.measure(contestants, cell, arguments)
        ours = results.get("engine")
        for contestant in contestants:
            result = results[contestant.name]
            values: dict[str, Any] = {
                "version": contestant.version,
                "read_gb_per_s": bandwidth / 1e9,
                "logit_error": contestant.logit_error,
            }
            if isinstance(result, Failure):
                self.add(shape, threads, name, dtype, contestant.name, note=str(result), **values)
                continue
            for what, seconds in result.items():
                values["seconds"] = seconds
                if tokens is not None:
                    values["tokens_per_s"] = tokens / seconds
                if isinstance(ours, dict) and "" in ours:
                    values["engine_ratio"] = seconds / ours[""]
                batch_of_mixture = shape in MIXTURES and cell.batch > 1
                if cell.kind in ("decode", "generate") and not batch_of_mixture:  # a prefill is bound by arithmetic
                    steps = self.options.steps / seconds
                    values["share_of_limit"] = steps * contestant.weight_bytes / bandwidth
                who = f"{contestant.name}, {what}" if what else contestant.name
                self.add(shape, threads, name, dtype, who, **values)

    def run(self) -> None:
        for shape in self.options.shapes:
            for threads in self.options.threads:
                with threads_set_to(threads):
                    for dtype in self.options.dtypes:
                        chosen = self.options.cells or SHAPE_CELLS[shape]
                        self.group(shape, threads, dtype, [name for name in chosen if dtype in CELLS[name].dtypes])


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "generate.csv", threads=[1, 2], rounds=5, resume=False)
    some = harness.names
    parser.add_argument("--shapes", type=some("shape", [*SHAPES]), default=["1.1B", "160M"], help="default: 1.1B,160M")
    all_dtypes = f"default: {','.join(DTYPES)}"
    parser.add_argument("--dtypes", type=some("dtype of weights", DTYPES), default=[*DTYPES], help=all_dtypes)
    parser.add_argument(
        "--cells",
        type=some("cell", [*CELLS]),
        help=f"of {','.join(CELLS)} (default: generate for 160M, those of decode and prefill for 1.1B)",
    )
    usual = [name for name in PEERS if name not in ("ranks", "gguf", "vLLM")]  # no other engines; and a large one
    parser.add_argument(
        "--peers", type=some("peer", [*PEERS]), default=usual, help=f"default: {','.join(usual)}; ranks; gguf; vLLM"
    )
    help_text = "of a decode measurement and generate() (default: 32)"
    parser.add_argument("--steps", type=harness.count, default=32, help=help_text)
    add_options(parser)
    options = parser.parse_args(argv)
    with Results(options.out, COLUMNS) as results:
        Bench(options, results).run()
    print(f"drawn in {plot.write(options.out)}")


if __name__ == "__main__":
    main()
