"""A Llama compiled by torch.compile with backend="infini" against plain Inductor; and what the backend finds where.

    python benchmarks/compile.py --threads 1          # results/compile.csv
    python benchmarks/compile.py --sites              # results/compile-sites.csv

Models nobody edited, random weights, bfloat16, batch 1, a static cache; the two take turns and medians count.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from torch_infini import compile as infini_compile
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import results_of, write_csv
from torch_infini.testing.families import FAMILIES, errors_of, tokens
from torch_infini.testing.llama import random_llama

PREFILL = 512
RESULTS = results_of(__file__)
SHAPES = ("1.1B", "160M")
BACKENDS = ("inductor", "infini")


@dataclass
class Row:
    """One line of compile.csv."""

    shape: str
    phase: str
    layers: int
    threads: int
    inductor_ms: float
    infini_ms: float
    ratio: float


@dataclass
class Site:
    """One line of compile-sites.csv: a family in a dtype; distances are root mean squares over the logits."""

    family: str
    dtype: str
    pattern: str
    expected: int
    found: int
    replaced: int
    left: str
    eager_from_float64: float
    infini_from_float64: float
    infini_from_eager: float


class Generator:
    """One compiled model with its static cache."""

    def __init__(self, model: nn.Module, backend: str, length: int) -> None:
        config: Any = model.config
        self.call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        self.cache = StaticCache(config=config, max_cache_len=length)
        head = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(1, config.num_key_value_heads, head, torch.bfloat16, torch.device("cpu"))

    def step(self, ids: Tensor) -> Tensor:
        return self.call(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def prefill(self, ids: Tensor) -> float:
        self.cache.reset()
        start = time.perf_counter()
        self.step(ids)
        return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        """Seconds for a step, behind the prompt."""
        token = torch.ones(1, 1, dtype=torch.long)
        start = time.perf_counter()
        for _ in range(steps):
            token = self.step(token)[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - start) / steps


def run(shape: str, layers: int | None, threads: int, steps: int, rounds: int) -> list[Row]:
    torch._dynamo.reset()
    with threads_set_to(threads), torch.no_grad():
        model = random_llama(shape, layers)
        prompt = torch.randint(32000, (1, PREFILL), generator=torch.Generator().manual_seed(0))
        generators = {backend: Generator(model, backend, PREFILL + 2 * steps) for backend in BACKENDS}
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds + 1):
            for backend, generator in generators.items():
                seconds = {"prefill": generator.prefill(prompt), "decode": generator.decode(steps)}
                for phase, value in seconds.items():
                    if turn:  # the first turn compiles
                        times.setdefault((phase, backend), []).append(value)
    rows = []
    for phase in ("prefill", "decode"):
        plain, infini = (1e3 * statistics.median(times[phase, backend]) for backend in BACKENDS)
        rows.append(Row(shape, phase, model.config.num_hidden_layers, threads, plain, infini, plain / infini))
    return rows


def sites() -> list[Site]:
    rows = []
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch._dynamo.reset()
            model = family.build().to(dtype)
            ids = tokens(2, 24)
            call = lambda m, ids=ids: m(input_ids=ids, use_cache=False).logits
            with torch.no_grad():
                actual = call(torch.compile(model, backend="infini", fullgraph=True, dynamic=False))
                errors = errors_of(actual, call(model), call(copy.deepcopy(model).double()))
            report = infini_compile.last_report()
            assert report is not None
            reasons = dict(report.left)
            name = str(dtype).removeprefix("torch.")
            rows += [
                Site(
                    family.name, name, pattern, expected, report.found[pattern], report.replaced[pattern],
                    reasons.get(pattern, ""), errors.eager, errors.compiled, errors.between,
                )
                for pattern, expected in family.sites.items()
            ]  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", action="store_true", help="count sites and errors of six families instead")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"default: {','.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="fewer for a quick look (default: all of the shape)")
    parser.add_argument("--threads", default="1", help="numbers of threads, separated by commas (default: 1)")
    parser.add_argument("--steps", type=int, default=16, help="tokens of a decode measurement (default: 16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV file (default: results/compile.csv or compile-sites.csv)")
    options = parser.parse_args(argv)
    if options.sites:
        found = sites()
        path = options.out or RESULTS / "compile-sites.csv"
        write_csv(path, found, Site)
        print(f"{len(found)} rows in {path}")
        return
    rows = []
    for shape in options.shapes.split(","):
        for threads in options.threads.split(","):
            rows += run(shape, options.layers, int(threads), options.steps, options.rounds)
            for row in rows[-2:]:
                print(f"{row.shape} {row.phase}, {row.threads} threads: Inductor {row.inductor_ms:.1f} ms, infini "
                      f"{row.infini_ms:.1f} ms, ratio {row.ratio:.2f}", flush=True)  # fmt: skip
    path = options.out or RESULTS / "compile.csv"
    write_csv(path, rows, Row)
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
