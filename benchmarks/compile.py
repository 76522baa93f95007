"""A Llama compiled by torch.compile with backend="infini" against plain Inductor; and what the backend finds where.

    python benchmarks/compile.py --threads 1          # results/CPU/compile.csv
    python benchmarks/compile.py --sites              # results/CPU/compile-sites.csv

Models nobody edited, random weights, bfloat16, batch 1, a static cache; the two take turns and medians count. Of the
sites: a row a family, dtype and pattern; distances are root mean squares over the logits.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import RESULTS, Cases, Row, dtype_name, taken
from torch import Tensor, nn
from transformers import StaticCache

from torch_infini import compile as infini_compile
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.testing.families import FAMILIES, Family, errors_of, tokens
from torch_infini.testing.shapes import LLAMAS, random_of_shape

PREFILL = 512
BACKENDS = ("inductor", "infini")


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


def measure(shape: str, layers: int | None, steps: int, rounds: int) -> list[Row]:
    torch._dynamo.reset()
    model = random_of_shape(shape, layers)
    prompt = torch.randint(model.config.vocab_size, (1, PREFILL), generator=torch.Generator().manual_seed(0))

    def measurement(backend: str) -> Callable[[], dict[str, float]]:
        generator = Generator(model, backend, PREFILL + 2 * steps)
        return lambda: {"prefill": generator.prefill(prompt), "decode": generator.decode(steps)}

    times = interleaved_medians({backend: measurement(backend) for backend in BACKENDS}, rounds)
    rows = []
    for phase in ("prefill", "decode"):
        of_phase = {backend: times[backend, phase] for backend in BACKENDS}
        row = {"phase": phase, "layers": model.config.num_hidden_layers, **taken(of_phase, *BACKENDS, unit="ms")}
        rows.append({**row, "ratio": of_phase["inductor"] / of_phase["infini"]})
    return rows


def sites_of(family: Family, dtype: torch.dtype) -> list[Row]:
    torch._dynamo.reset()
    model = family.build().to(dtype)
    ids = tokens(2, 24)
    call: Callable[[nn.Module], Tensor] = lambda m: m(input_ids=ids, use_cache=False).logits
    actual = call(torch.compile(model, backend="infini", fullgraph=True, dynamic=False))
    errors = errors_of(actual, call(model), call(copy.deepcopy(model).double()))
    report = infini_compile.last_report()
    assert report is not None
    return [
        {
            "pattern": pattern,
            "expected": expected,
            "found": report.found[pattern],
            "replaced": report.replaced[pattern],
            "left": dict(report.left).get(pattern, ""),
            "eager_from_float64": errors.eager,
            "infini_from_float64": errors.compiled,
            "infini_from_eager": errors.between,
        }
        for pattern, expected in family.sites.items()
    ]


def cases(options: argparse.Namespace) -> Cases:
    if options.sites:
        for family in FAMILIES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                yield {"family": family.name, "dtype": dtype_name(dtype)}, partial(sites_of, family, dtype)
        return
    for shape in options.shapes:
        for threads in options.threads:
            key = {"shape": shape, "threads": threads}
            yield key, partial(measure, shape, options.layers, options.steps, options.rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "compile.csv", threads=[1], rounds=5)
    parser.set_defaults(out=None)
    parser.add_argument("--sites", action="store_true", help="count sites and errors of six families instead")
    shapes = harness.names("shape", [*LLAMAS])
    parser.add_argument("--shapes", type=shapes, default=["1.1B", "160M"], help="default: 1.1B,160M")
    parser.add_argument("--layers", type=harness.count, help="fewer for a quick look (default: all of the shape)")
    parser.add_argument("--steps", type=harness.count, default=16, help="of a decode measurement (default: 16)")
    options = parser.parse_args(argv)
    default = RESULTS / ("compile-sites.csv" if options.sites else "compile.csv")
    harness.run(options, cases(options), options.out or default)


if __name__ == "__main__":
    main()
