"""Times linear_int8 and linear_int4 against torch's own weight-only products, and against the memory bandwidth.

    python benchmarks/run.py --quantised --threads 1,2

All contestants multiply x by weights of the same shape. Each is called once a round, after 256 MiB were read, so that
it finds its weight in memory and not in a cache, as a layer of a model does; medians over the rounds. Ratios are the
rival's time over ours. The share is of the bandwidth of that reading, a dot product of two vectors; what has to move is
the packed weight with its scales and zeros. Groups are of 64. torch's own products are timed for bfloat16 alone: for
the other dtypes they take 20 to 100 times as long. quantize_x: with int8 x too; then the peak of VNNI's products of
bytes, measured before, is the limit for many rows, and quantising x is in the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from c_abi import READ, measure_peaks, nbytes

from torch_infini import quantize
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import Call, seconds, write_csv
from torch_infini.testing.ops import OP_INFOS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (rows, k, n, quantize_x)
CASES = [
    *((rows, 4096, n, False) for n in (14336, 4096) for rows in (1, 8, 32)),
    *((rows, 4096, n, True) for n in (14336, 4096) for rows in (1, 4, 8, 32)),
    *((512, k, n, True) for k, n in ((2048, 5632), (5632, 2048))),
]
QUICK = [(1, 256, 512, False), (8, 256, 512, True)]
GROUP = 64


@dataclass
class Row:
    """One line of the CSV; microseconds, None where torch has no such product."""

    op: str
    rows: int
    k: int
    n: int
    dtype: str
    threads: int
    quantize_x: bool
    infini_us: float
    torch_us: float | None  # _weight_int8pack_mm, _weight_int4pack_mm_for_cpu
    dense_us: float  # torch.nn.functional.linear in the dtype of x
    ratio_to_torch: float | None
    ratio_to_dense: float
    read_gb_per_s: float
    share: float
    vnni_gop_per_s: float | None  # the peak; with quantize_x on machines that have it
    share_of_vnni: float | None


def names() -> list[str]:
    """The ops that are timed."""
    return ["linear_int8", "linear_int4"]


def contestants(
    op: str, x: torch.Tensor, weight: torch.Tensor, quantize_x: bool, out: torch.Tensor
) -> tuple[dict[str, Call], int]:
    """What is timed, and the bytes of the packed weight."""
    infini = OP_INFOS[op].out
    calls: dict[str, Call] = {"dense": lambda: torch.nn.functional.linear(x, weight)}
    if op == "linear_int8":
        q, scales = quantize.quantize_int8(weight)
        calls["infini"] = lambda: infini(x, q, scales, None, quantize_x, out=out)
        own = scales.to(x.dtype)
        calls["torch"] = lambda: torch.ops.aten._weight_int8pack_mm(x, q, own)
        return calls, nbytes(q, scales)
    packed, scales, zeros = quantize.quantize_int4(weight, GROUP)
    calls["infini"] = lambda: infini(x, packed, scales, zeros, None, quantize_x, out=out)
    values = quantize.unpack_int4(packed).int()
    own_packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    own_scales = torch.stack((scales.t(), zeros.t()), -1).contiguous()
    calls["torch"] = lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, own_packed, GROUP, own_scales)
    return calls, nbytes(packed, scales, zeros)


def cold_medians(calls: Mapping[str, Call], rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of each call from memory, and of reading READ."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    reads = []
    for _ in range(rounds):
        for name, call in calls.items():
            reads.append(seconds(lambda: torch.dot(*READ)))
            times[name].append(seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}, statistics.median(reads)


def measure(op: str, case: tuple[int, int, int, bool], dtype: torch.dtype, vnni_peak: float | None, rounds: int) -> Row:
    rows, k, n, quantize_x = case
    x, weight = torch.randn(rows, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    out = torch.empty(rows, n, dtype=dtype)
    calls, size = contestants(op, x, weight, quantize_x, out)
    if dtype != torch.bfloat16:
        del calls["torch"]
    times, read = cold_medians(calls, rounds)
    bandwidth = nbytes(*READ) / read
    own = times.get("torch")
    return Row(
        op=op,
        rows=rows,
        k=k,
        n=n,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        quantize_x=quantize_x,
        infini_us=times["infini"] * 1e6,
        torch_us=own * 1e6 if own else None,
        dense_us=times["dense"] * 1e6,
        ratio_to_torch=own / times["infini"] if own else None,
        ratio_to_dense=times["dense"] / times["infini"],
        read_gb_per_s=bandwidth / 1e9,
        share=size / bandwidth / times["infini"],
        vnni_gop_per_s=vnni_peak / 1e9 if quantize_x and vnni_peak else None,
        share_of_vnni=2 * rows * k * n / vnni_peak / times["infini"] if quantize_x and vnni_peak else None,
    )


def line(row: Row) -> str:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.op:12} {f'{row.rows}x{row.k}->{row.n}':16} {row.dtype:9} {row.threads:2} "
        f"{'int8' if row.quantize_x else '-':4} {row.infini_us:>10.1f} "
        f"{number(row.torch_us, 1):>10} {row.dense_us:>10.1f} {number(row.ratio_to_torch, 2):>7} "
        f"{row.ratio_to_dense:>7.2f} {row.share:6.0%} of {row.read_gb_per_s:.0f} GB/s"
        + (f" {row.share_of_vnni:5.0%} of {row.vnni_gop_per_s:.0f} GOP/s" if row.share_of_vnni else "")
    )


HEADER = (
    f"{'op':12} {'shape':16} {'dtype':9} {'th':>2} {'x as':4} {'infini us':>10} {'torch us':>10} {'dense us':>10} "
    f"{'/torch':>7} {'/dense':>7} {'share':>6}"
)


def run(ops: Sequence[str], dtypes: Sequence[torch.dtype] | None, threads: Sequence[int], quick: bool) -> list[Row]:
    """Measure and print. Quick: one dtype, two small shapes, short measurements."""
    rounds = 3 if quick else 15
    result: list[Row] = []
    for count in threads:
        vnni_peak = measure_peaks(count, 0.05 if quick else 1)[torch.int8] or None
        with threads_set_to(count), torch.no_grad():
            print(f"{count} thread(s)\n{HEADER}")
            for op in ops:
                for dtype in [d for d in DTYPES if dtypes is None or d in dtypes][: 1 if quick else None]:
                    for case in QUICK if quick else CASES:
                        result.append(measure(op, case, dtype, vnni_peak, rounds))
                        print(line(result[-1]), flush=True)
    return result


def write(path: Path, rows: Sequence[Row]) -> None:
    write_csv(path, rows, Row)
    print(f"{len(rows)} rows in {path}")
