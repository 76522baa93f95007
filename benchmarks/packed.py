"""Times linear_packed against linear and torch's own product, bfloat16, by the number of rows of x.

    python benchmarks/packed.py --threads 1,2

A call is all products of a decoder layer of the 1.1B shape (q, k and v; attention's output; gate and up; down). The
layers take turns, so that a weight comes from memory and not from a cache; so do the contestants, and medians count.
The limit is the longer of two times: to read the weights at the measured bandwidth, and to multiply at the measured
peak of the multiply units.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from c_abi import measure_peaks
from torch import Tensor

from torch_infini._bandwidth import read_bandwidth
from torch_infini.nn import Linear
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import count, counts, results_of, seconds, write_csv

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
SHAPES = [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048)]  # k, n
QUICK = [(64, 96), (96, 64)]
LAYERS = 8


@dataclass
class Row:
    """One line of the CSV; milliseconds of a layer's products."""

    rows: int
    threads: int
    packed_ms: float
    linear_ms: float
    torch_ms: float
    ratio_to_linear: float
    ratio_to_torch: float
    gflop_per_s: float
    gb_per_s: float  # of weights
    limit: str
    share: float
    rounds: int


def contestants(layers: list[list[Tensor]]) -> dict[str, Callable[[int, int, Tensor, Tensor], object]]:
    """Calls with the number of a layer, of a product in it, x and out."""
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


def measure(threads: int, quick: bool, rounds: int) -> list[Row]:
    shapes, numbers = (QUICK, [1, 20]) if quick else (SHAPES, ROWS)
    layers = [[Linear(k, n, dtype=torch.bfloat16).weight.data for k, n in shapes] for _ in range(LAYERS)]
    for weight in (weight for layer in layers for weight in layer):
        weight.normal_(0, 0.02)
    calls = contestants(layers)
    peak, elements = measure_peaks(threads, 0.05 if quick else 1)[torch.bfloat16], sum(k * n for k, n in shapes)
    result = []
    for rows in numbers:
        xs = [torch.randn(rows, k).bfloat16() for k, _ in shapes]
        outs = [torch.empty(rows, n, dtype=torch.bfloat16) for _, n in shapes]
        times: dict[str, list[float]] = {name: [] for name in calls}
        bandwidth = 0.0
        for turn in range(rounds + 1):  # the first one warms up
            bandwidth = max(bandwidth, read_bandwidth(0.02 if quick else 0.2))
            for name, call in calls.items():
                spent = 0.0
                for i in range(LAYERS):
                    for j, (x, out) in enumerate(zip(xs, outs, strict=True)):
                        spent += seconds(lambda i=i, j=j, x=x, out=out, call=call: call(i, j, x, out))
                if turn:
                    times[name].append(spent / LAYERS)
        ms = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        by_memory, by_units = 2 * elements / bandwidth, 2 * rows * elements / peak
        row = Row(
            rows=rows,
            threads=threads,
            packed_ms=ms["packed"],
            linear_ms=ms["linear"],
            torch_ms=ms["torch"],
            ratio_to_linear=ms["linear"] / ms["packed"],
            ratio_to_torch=ms["torch"] / ms["packed"],
            gflop_per_s=2 * rows * elements / ms["packed"] / 1e6,
            gb_per_s=2 * elements / ms["packed"] / 1e6,
            limit=f"{bandwidth / 1e9:.0f} GB/s" if by_memory > by_units else f"{peak / 1e9:.0f} GFLOP/s",
            share=max(by_memory, by_units) / ms["packed"] * 1e3,
            rounds=rounds,
        )
        result.append(row)
        print(
            f"{rows:4} rows, {threads} thread(s): packed {row.packed_ms:8.2f} ms, linear {row.ratio_to_linear:.2f}x, "
            f"torch {row.ratio_to_torch:.2f}x, {row.share:.0%} of {row.limit}",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=counts, default=[1, 2], help="default: 1,2")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--quick", action="store_true", help="small shapes, short measurements")
    parser.add_argument("--out", type=Path, default=results_of(__file__) / "packed.csv")
    options = parser.parse_args()
    rows: list[Row] = []
    for threads in options.threads:
        with threads_set_to(threads), torch.no_grad():
            rows += measure(threads, options.quick, options.rounds)
    write_csv(options.out, rows, Row)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
