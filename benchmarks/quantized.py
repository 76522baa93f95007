"""Times products with quantized weights against torch's own weight-only products: results/CPU/quantized.csv.

    python benchmarks/run.py --quantized --threads 1,2

All contestants multiply x by weights of the same shape. Each is called once a round, after 256 MiB were read, so that
it finds its weight in memory and not in a cache, as a layer of a model does; medians over the rounds. Ratios are the
rival's time over ours: `torch` is _weight_int8pack_mm or _weight_int4pack_mm_for_cpu, `dense` linear in the dtype of x.
The share is of the bandwidth of that reading, the sum of a vector; what has to move is the packed weight with
its scales and zeros. Groups are of 64. torch's own products are timed for bfloat16 alone: for the other dtypes they
take 20 to 100 times as long. quantize_x: with int8 x too, as the last two always have it; then the peak of VNNI's
products of bytes, measured before, is the limit for many rows (None on machines without VNNI), and quantizing x is in
the time. linear_blocks is timed for each kind of block, which torch has no product for.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import harness
import torch
from harness import Cases, Row, dtype_name, ratios, taken
from limits import READ_BYTES, measure_peaks, read_once
from op_cases import info_of, nbytes

from torch_infini.ops._blocks import KINDS
from torch_infini.testing.benchmark import Call, seconds
from torch_infini.testing.ops.linear_blocks import random_weight
from torch_infini.weights import FORMATS, quantize

IN_PANELS = ("linear_group8", "linear_table4")  # they quantize x always
BLOCKS = "linear_blocks"
OPS = ("linear_int8", "linear_int4", *IN_PANELS, BLOCKS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (rows, k, n, quantize_x)
CASES = [
    *((rows, 4096, n, False) for n in (14336, 4096) for rows in (1, 8, 32)),
    *((rows, 4096, n, True) for n in (14336, 4096) for rows in (1, 4, 8, 32)),
    (512, 2048, 5632, False),
    *((512, k, n, True) for k, n in ((2048, 5632), (5632, 2048))),
]
QUICK = [(1, 256, 512, False), (8, 256, 512, True)]
GROUP = 64


def contestants(
    op: str, x: torch.Tensor, weight: torch.Tensor, quantize_x: bool, out: torch.Tensor
) -> tuple[dict[str, Call], int]:
    """What is timed, and the bytes of the packed weight; op: of OPS, "linear_blocks" and a kind of block after it."""
    op, _, kind = op.partition(" ")
    infini = info_of(op).out
    calls: dict[str, Call] = {"dense": lambda: torch.nn.functional.linear(x, weight)}
    if op == BLOCKS:
        n, k = weight.shape  # a few rows again and again: times do not depend on the values
        blocks = random_weight(KINDS[kind], 16, k).repeat(n // 16, 1, 1)
        calls["infini"] = lambda: infini(x, blocks, KINDS[kind].number, None, out=out)
        return calls, nbytes(blocks)
    if op in IN_PANELS:
        format = FORMATS[op.removeprefix("linear_")]
        integers = format.empty(*weight.shape, 0, x.dtype, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        format.quantize(weight, integers)
        calls["infini"] = lambda: infini(x, integers.weight, integers.scales, None, out=out)
        size = nbytes(integers.weight, integers.scales)
    if op in ("linear_int8", "linear_group8"):  # torch's product is the rival of both
        q, scales = quantize.quantize_int8(weight)
        own = scales.to(x.dtype)
        calls["torch"] = lambda: torch.ops.aten._weight_int8pack_mm(x, q, own)
        if op not in IN_PANELS:
            calls["infini"] = lambda: infini(x, q, scales, None, quantize_x, out=out)
            size = nbytes(q, scales)
        return calls, size
    packed, scales, zeros = quantize.quantize_int4(weight, GROUP)
    if op not in IN_PANELS:
        calls["infini"] = lambda: infini(x, packed, scales, zeros, None, quantize_x, out=out)
        size = nbytes(packed, scales, zeros)
    values = quantize.unpack_int4(packed).int()
    own_packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    own_scales = torch.stack((scales.t(), zeros.t()), -1).contiguous()
    calls["torch"] = lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, own_packed, GROUP, own_scales)
    return calls, size


def cold_medians(calls: Mapping[str, Call], rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of each call from memory, and of reading READ_BYTES."""
    for call in (read_once, *calls.values()):
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    reads = []
    for _ in range(rounds):
        for name, call in calls.items():
            reads.append(seconds(read_once))
            times[name].append(seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}, statistics.median(reads)


def measure(op: str, case: tuple[int, int, int, bool], dtype: torch.dtype, vnni_peak: float, rounds: int) -> Row:
    rows, k, n, quantize_x = case
    x, weight = torch.randn(rows, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    out = torch.empty(rows, n, dtype=dtype)
    calls, size = contestants(op, x, weight, quantize_x, out)
    if dtype != torch.bfloat16:
        calls.pop("torch", None)
    times, read = cold_medians(calls, rounds)
    bandwidth = READ_BYTES / read
    has_peak = quantize_x and vnni_peak
    return {
        **taken(times, "infini", "torch", "dense"),
        **ratios(times, "torch", "dense"),
        "read_gb_per_s": bandwidth / 1e9,
        "share": size / bandwidth / times["infini"],
        "vnni_gop_per_s": vnni_peak / 1e9 if has_peak else None,
        "share_of_vnni": 2 * rows * k * n / vnni_peak / times["infini"] if has_peak else None,
    }


def cases(options: argparse.Namespace) -> Cases:
    rounds = 3 if options.quick else 15
    dtypes = [d for d in DTYPES if options.dtypes is None or d in options.dtypes][: 1 if options.quick else None]
    for threads in options.threads:
        vnni_peak = measure_peaks(threads, 0.05 if options.quick else 1)[torch.int8]
        ops = [name for op in options.ops for name in ([f"{op} {kind}" for kind in KINDS] if op == BLOCKS else [op])]
        for op, dtype in ((op, dtype) for op in ops for dtype in dtypes):
            for case in QUICK if options.quick else CASES:
                x_rows, k, n, quantize_x = case
                if quantize_x and op.startswith(BLOCKS) or not quantize_x and op in IN_PANELS:
                    continue
                key = {"op": op, "rows": x_rows, "k": k, "n": n, "dtype": dtype_name(dtype), "threads": threads}
                yield {**key, "quantize_x": quantize_x}, partial(measure, op, case, dtype, vnni_peak, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    quick = "one dtype, two small shapes, short measurements"
    parser = harness.new_parser(__doc__, "quantized.csv", threads=[1], quick=quick, ops=OPS, with_dtypes=True)
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
