"""Times linear_packed against linear and torch's own product, bfloat16, by the number of rows of x.

    python benchmarks/packed.py --threads 1,2        # results/CPU/packed.csv

A call is all products of a decoder layer of the 1.1B shape (q, k and v; attention's output; gate and up; down). The
layers take turns, so that a weight comes from memory and not from a cache; so do the contestants, and medians count.
The limit is the longer of two times: to read the weights at the measured bandwidth, and to multiply at the measured
peak of the multiply units.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import harness
import torch
from harness import Cases, Row, ratios, taken
from limits import measure_peaks
from torch import Tensor

from torch_infini._core.bandwidth import read_bandwidth
from torch_infini.nn import Linear
from torch_infini.testing.benchmark import interleaved_medians, seconds

Product = Callable[[int, int, Tensor, Tensor], object]  # of the number of a layer, of a product in it, x and out
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
SHAPES = [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048)]  # k, n
QUICK = [(64, 96), (96, 64)]
LAYERS = 8


def contestants(layers: list[list[Tensor]]) -> dict[str, Product]:
    packed = [[Linear(w.shape[1], w.shape[0], format="packed", dtype=w.dtype) for w in layer] for layer in layers]
    for of_layer, weights in zip(packed, layers, strict=True):
        for linear, weight in zip(of_layer, weights, strict=True):
            linear.load(weight)
    ours = torch.ops.infini.linear.out
    return {
        "packed": lambda i, j, x, out: packed[i][j](x, out),
        "linear": lambda i, j, x, out: ours(x, layers[i][j], None, out=out),
        "torch": lambda i, j, x, out: torch.nn.functional.linear(x, layers[i][j]),
    }


def of_a_layer(call: Product, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> Callable[[], dict[str, float]]:
    """The mean time of a layer's products, each timed by itself."""

    def take_time() -> dict[str, float]:
        spent = 0.0
        for i in range(LAYERS):
            for j, (x, out) in enumerate(zip(xs, outs, strict=True)):
                spent += seconds(partial(call, i, j, x, out))
        return {"": spent / LAYERS}

    return take_time


def measure(
    rows: int, shapes: Sequence[tuple[int, int]], calls: Mapping[str, Product], peak: float, quick: bool, rounds: int
) -> Row:
    elements = sum(k * n for k, n in shapes)
    xs = [torch.randn(rows, k).bfloat16() for k, _ in shapes]
    outs = [torch.empty(rows, n, dtype=torch.bfloat16) for _, n in shapes]
    reads: list[float] = []
    found = interleaved_medians(
        {name: of_a_layer(call, xs, outs) for name, call in calls.items()},
        rounds,
        before=lambda: reads.append(read_bandwidth(0.02 if quick else 0.2)),
    )
    times = {name: found[name, ""] for name in calls}
    bandwidth, packed = max(reads), times["packed"]
    by_memory, by_units = 2 * elements / bandwidth, 2 * rows * elements / peak
    return {
        **taken(times, "packed", "linear", "torch", unit="ms"),
        **ratios(times, "linear", "torch", to="packed"),
        "gflop_per_s": 2 * rows * elements / packed / 1e9,
        "gb_per_s": 2 * elements / packed / 1e9,
        "limit": f"{bandwidth / 1e9:.0f} GB/s" if by_memory > by_units else f"{peak / 1e9:.0f} GFLOP/s",
        "share": max(by_memory, by_units) / packed,
        "rounds": rounds,
    }


def cases(options: argparse.Namespace) -> Cases:
    shapes, numbers = (QUICK, [1, 20]) if options.quick else (SHAPES, ROWS)
    for threads in options.threads:
        layers = [[Linear(k, n, dtype=torch.bfloat16).weight.data for k, n in shapes] for _ in range(LAYERS)]
        for weight in (weight for layer in layers for weight in layer):
            weight.normal_(0, 0.02)
        calls = contestants(layers)
        peak = measure_peaks(threads, 0.05 if options.quick else 1)[torch.bfloat16]
        for rows in numbers:
            key = {"rows": rows, "threads": threads}
            yield key, partial(measure, rows, shapes, calls, peak, options.quick, options.rounds)


def main(argv: Sequence[str] | None = None) -> None:
    quick = "small shapes, short measurements"
    options = harness.new_parser(__doc__, "packed.csv", threads=[1, 2], rounds=7, quick=quick).parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
