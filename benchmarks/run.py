"""Times every op against what a user would write in plain torch, eager and compiled: results/CPU/ops.csv.

    python benchmarks/run.py --ops rms_norm,random_sample --dtypes bfloat16 --threads 1,2
    python benchmarks/run.py --c-abi        # the C libraries: see c_abi.py
    python benchmarks/run.py --quantized    # products with quantized weights: see quantized.py

Each op runs on its own bench samples; ratios are the rival's time over the op's, so above 1 the op is faster. The share
is of the memory bandwidth or the matrix product rate that the same run measured, whichever bounds the op's least work.
Data that fits the caches stays there between calls: shares of bandwidth above 1 are no error. A rival that fails has no
time, and the note says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import c_abi
import harness
import quantized
import torch
from harness import Cases, Row, dtype_name, first_line, ratios, taken
from limits import Limits, measure_limits
from op_cases import Case, bench_cases, info_of, op_names

from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import Call, medians

TIE = 0.03  # what shared machines scatter by from one median to the next
INSTEAD = {"--c-abi": c_abi.main, "--quantized": quantized.main}


def rivals(case: Case, with_compile: bool) -> tuple[dict[str, Call], list[str]]:
    """The peer eager and compiled, each called once; and in words which of them cannot run."""
    torch._dynamo.reset()
    contestants: dict[str, Call] = {}
    notes = []
    peers = {"eager": case.peer, **({"compile": torch.compile(case.peer)} if with_compile else {})}
    for name, peer in peers.items():
        call = case.call_of(peer)
        try:
            call()
        except Exception as error:  # whatever torch or the compiler raises is a result to report
            notes.append(f"{name} fails: {first_line(error)}")
        else:
            contestants[name] = call
    return contestants, notes


def measure(case: Case, dtype: torch.dtype, limits: Limits, rounds: int, least: float, with_compile: bool) -> Row:
    """Time one sample with the current number of threads."""
    contestants = {"infini": case.functional}
    if out := case.out:
        contestants["infini_out"] = out
    others, notes = rivals(case, with_compile)
    times = medians(contestants | others, rounds, least)
    cost = case.cost
    matmul_dtype, flops = limits.matmul(dtype)
    best = times.get("infini_out", times["infini"])
    by_memory, by_arithmetic = cost.bytes / limits.bandwidth, cost.flops / flops
    arithmetic = f"torch matmul {dtype_name(matmul_dtype)}, {flops / 1e9:.0f} GFLOP/s"
    return {
        **taken(times, "infini", "infini_out", "eager", "compile"),
        **ratios(times, "eager", "compile"),
        "gb_per_s": cost.bytes / best / 1e9,
        "limit": "memory bandwidth" if by_memory >= by_arithmetic else arithmetic,
        "share": max(by_memory, by_arithmetic) / best,
        "read_gb_per_s": limits.read / 1e9,
        "copy_gb_per_s": limits.copy / 1e9,
        "note": "; ".join(notes),
    }


def cases(options: argparse.Namespace) -> Cases:
    rounds, least = (3, 0.002) if options.quick else (9, 0.02)
    some = slice(1 if options.quick else None)
    for threads in options.threads:
        with threads_set_to(threads):
            limits = measure_limits(128, 1024) if options.quick else measure_limits()
        print(f"{threads} threads: {limits}")
        for op in options.ops:
            for dtype in [d for d in info_of(op).dtypes if options.dtypes is None or d in options.dtypes][some]:
                for case in list(bench_cases(op, dtype))[some]:
                    key = {"op": op, "sample": case.sample.name, "dtype": dtype_name(dtype), "threads": threads}
                    yield key, partial(measure, case, dtype, limits, rounds, least, not options.no_compile)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else [*argv]
    for option in INSTEAD.keys() & set(arguments):
        return INSTEAD[option]([argument for argument in arguments if argument != option])
    quick = "one sample and one dtype an op, short measurements"
    parser = harness.new_parser(__doc__, "ops.csv", threads=[1], quick=quick, ops=op_names(), with_dtypes=True)
    for option in INSTEAD:
        parser.add_argument(option, action="store_true", help="another benchmark instead, with options of its own")
    help_text = "leave out torch.compile, which takes most of the time"
    parser.add_argument("--no-compile", action="store_true", help=help_text)
    options = parser.parse_args(arguments)
    rows = harness.run(options, cases(options))
    ratios = [(float(row["ratio_to_eager"]), row) for row in rows if row["ratio_to_eager"]]
    slower = [(ratio, row) for ratio, row in ratios if ratio < 1 - TIE]
    print(f"{len(slower)} of them are slower than eager torch by more than {TIE:.0%}{':' if slower else ''}")
    for ratio, row in sorted(slower, key=lambda pair: pair[0]):
        print(f"  {row['op']} {row['sample']} {row['dtype']}, {row['threads']} threads: {ratio:.2f}")


if __name__ == "__main__":
    main()
