"""Times every op of the registry against what a user would write in plain torch, eager and compiled; writes CSV.

    python benchmarks/run.py --ops rms_norm,random_sample --dtypes bfloat16 --threads 1,2
    python benchmarks/run.py --c-abi        # the C libraries: see c_abi.py
    python benchmarks/run.py --quantised    # products with quantised weights: see quantised.py

Each op runs on its own bench samples; ratios are the rival's time over the op's, so above 1 the op is faster. The share
is of the memory bandwidth or the matrix product rate that the same run measured, whichever bounds the op's least work.
Data that fits the caches stays there between calls: shares of bandwidth above 1 are no error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import c_abi
import quantised
import torch

from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import Call, Limits, measure_limits, medians, results_of, write_csv
from torch_infini.testing.ops import OP_INFOS, OpInfo, Sample, all_op_infos

RESULTS = results_of(__file__)
TIE = 0.03  # what shared machines scatter by from one median to the next


@dataclass
class Row:
    """One line of the CSV; times in microseconds, None where there is no such measurement (the note says why)."""

    op: str
    sample: str
    dtype: str
    threads: int
    infini_us: float
    infini_out_us: float | None
    eager_us: float | None
    compile_us: float | None
    ratio_to_eager: float | None
    ratio_to_compile: float | None
    gb_per_s: float
    limit: str
    share: float
    read_gb_per_s: float
    copy_gb_per_s: float
    note: str


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def rivals(spec: OpInfo, sample: Sample, with_compile: bool) -> tuple[dict[str, Call], list[str]]:
    """The peer eager and compiled, each called once; and in words which of them cannot run."""
    torch._dynamo.reset()
    contestants: dict[str, Call] = {}
    notes = []
    peers = {"eager": spec.peer}
    if with_compile:
        peers["compile"] = torch.compile(spec.peer)
    for name, peer in peers.items():

        def call(peer: Any = peer) -> Any:
            return peer(*sample.args, **sample.kwargs)

        try:
            call()
        except Exception as error:  # whatever torch or the compiler raises is a result to report
            notes.append(f"{name} fails: {first_line(error)}")
        else:
            contestants[name] = call
    return contestants, notes


def measure(
    spec: OpInfo, sample: Sample, dtype: torch.dtype, limits: Limits, rounds: int, least: float, with_compile: bool
) -> Row:
    """Time one sample with the current number of threads."""
    args, kwargs = sample.args, sample.kwargs
    op = spec.op
    result = op(*args, **kwargs)
    contestants: dict[str, Call] = {"infini": lambda: op(*args, **kwargs)}
    if spec.outputs:  # of an op that writes into its arguments there is no other form
        out = spec.out
        outs = dict(zip(spec.out_names, result if isinstance(result, tuple) else (result,), strict=True))
        contestants["out"] = lambda: out(*args, **kwargs, **outs)
    others, notes = rivals(spec, sample, with_compile)
    times = medians(contestants | others, rounds, least)

    def ratio(name: str) -> float | None:
        return times[name] / times["infini"] if name in times else None

    def microseconds(name: str) -> float | None:
        return times[name] * 1e6 if name in times else None

    cost = spec.cost(*args, **kwargs)
    matmul_dtype, flops = limits.matmul(dtype)
    best = times.get("out", times["infini"])
    by_memory, by_arithmetic = cost.bytes / limits.bandwidth, cost.flops / flops
    name = str(matmul_dtype).removeprefix("torch.")
    return Row(
        op=spec.name,
        sample=sample.name,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        infini_us=times["infini"] * 1e6,
        infini_out_us=microseconds("out"),
        eager_us=microseconds("eager"),
        compile_us=microseconds("compile"),
        ratio_to_eager=ratio("eager"),
        ratio_to_compile=ratio("compile"),
        gb_per_s=cost.bytes / best / 1e9,
        limit="memory bandwidth" if by_memory >= by_arithmetic else f"torch matmul {name}, {flops / 1e9:.0f} GFLOP/s",
        share=max(by_memory, by_arithmetic) / best,
        read_gb_per_s=limits.read / 1e9,
        copy_gb_per_s=limits.copy / 1e9,
        note="; ".join(notes),
    )


def line(row: Row) -> str:
    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.op:24} {row.sample:32} {row.dtype:9} {row.threads:2} {number(row.infini_us):>10} "
        f"{number(row.infini_out_us):>10} {number(row.eager_us):>10} {number(row.compile_us):>10} "
        f"{number(row.ratio_to_eager, 2):>7} {number(row.ratio_to_compile, 2):>7} {number(row.gb_per_s):>7} "
        f"{row.share:6.0%} {row.limit}{'; ' + row.note if row.note else ''}"
    )


HEADER = (
    f"{'op':24} {'sample':32} {'dtype':9} {'th':>2} {'infini us':>10} {'out us':>10} {'eager us':>10} "
    f"{'compile us':>10} {'/eager':>7} {'/comp.':>7} {'GB/s':>7} {'share':>6} of"
)


def run(
    ops: Iterable[OpInfo],
    dtypes: Sequence[torch.dtype] | None,
    threads: Sequence[int],
    with_compile: bool,
    quick: bool,
) -> list[Row]:
    """Measure and print. Quick: one sample and one dtype an op, short measurements, for a look or a test."""
    ops = list(ops)
    rounds, least = (3, 0.002) if quick else (9, 0.02)
    rows: list[Row] = []
    for count in threads:
        with threads_set_to(count), torch.no_grad():
            limits = measure_limits(128, 1024) if quick else measure_limits()
            peaks = ", ".join(
                f"matmul {str(d).removeprefix('torch.')} {v / 1e9:.0f} GFLOP/s" for d, v in limits.flops.items()
            )
            print(f"{count} thread(s): read {limits.read / 1e9:.1f}, copy {limits.copy / 1e9:.1f} GB/s; {peaks}")
            print(HEADER)
            for spec in ops:
                wanted = [dtype for dtype in spec.dtypes if dtypes is None or dtype in dtypes]
                for dtype in wanted[:1] if quick else wanted:
                    for sample in list(spec.bench(dtype))[: 1 if quick else None]:
                        rows.append(measure(spec, sample, dtype, limits, rounds, least, with_compile))
                        print(line(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", help="names, separated by commas (default: all)")
    parser.add_argument("--dtypes", help="for example bfloat16,float32 (default: all that the op has)")
    parser.add_argument("--threads", default="1", help="numbers of threads, separated by commas (default: 1)")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/ops.csv, c-abi.csv or quantised.csv)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--c-abi",
        action="store_true",
        help="time the C ABI instead; --ops are names as in infiniopCreate<op>Descriptor",
    )
    instead.add_argument(
        "--quantised", action="store_true", help="time linear_int8 and linear_int4 against torch's own instead"
    )
    parser.add_argument("--quick", action="store_true", help="one sample and dtype an op, short measurements")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, which takes most of the time"
    )
    options = parser.parse_args(argv)
    known = [spec.name for spec in all_op_infos()]
    if options.c_abi or options.quantised:
        known = c_abi.names() if options.c_abi else quantised.names()
    names = options.ops.split(",") if options.ops else known
    for name in names:
        if name not in known:
            parser.error(f"there is no op {name!r}; there are {', '.join(known)}")
    dtypes = [getattr(torch, name, name) for name in options.dtypes.split(",")] if options.dtypes else None
    for dtype in dtypes or ():
        if not isinstance(dtype, torch.dtype):
            parser.error(f"{dtype!r} is no dtype of torch")
    threads = [int(count) for count in options.threads.split(",")]
    if options.c_abi:
        c_abi.write(options.out or RESULTS / "c-abi.csv", c_abi.run(names, dtypes, threads, options.quick))
        return
    if options.quantised:
        quantised.write(options.out or RESULTS / "quantised.csv", quantised.run(names, dtypes, threads, options.quick))
        return
    rows = run([OP_INFOS[name] for name in names], dtypes, threads, not options.no_compile, options.quick)
    path = options.out or RESULTS / "ops.csv"
    write_csv(path, rows, Row)
    print(f"{len(rows)} rows in {path}")
    slower = [row for row in rows if row.ratio_to_eager is not None and row.ratio_to_eager < 1 - TIE]
    print(f"{len(slower)} of them are slower than eager torch by more than {TIE:.0%}{':' if slower else ''}")
    for row in sorted(slower, key=lambda row: row.ratio_to_eager or 0):
        print(f"  {row.op} {row.sample} {row.dtype}, {row.threads} thread(s): {row.ratio_to_eager:.2f}")


if __name__ == "__main__":
    main()
