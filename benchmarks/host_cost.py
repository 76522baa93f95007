"""What a call of an op costs beside its kernel: every op on its smallest sample, beside aten.mul.

    python benchmarks/host_cost.py        # results/CPU/host-cost.csv

One thread, float32 where the op has it; functional and out forms (no out form where the op writes into its arguments)
in turns with aten.mul and its out form, medians. And what a call takes in a replayed program
(torch_infini.runtime.program) of 256 such calls, its kernel included.
"""

from __future__ import annotations

from collections.abc import Sequence

import harness
import torch
from harness import Results, Row, taken
from op_cases import op_names, smallest_case

from torch_infini.runtime import program
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import medians

REPLAYED = 256  # calls of one program


def measure(op: str) -> Row:
    case = smallest_case(op)
    call = case.functional
    x = torch.randn(8)
    y = torch.empty_like(x)
    mul, mul_out = torch.ops.aten.mul.Tensor, torch.ops.aten.mul.out

    def repeated() -> None:
        for _ in range(REPLAYED):
            call()

    calls = {
        "functional": call,
        "replayed": program(repeated).replay,
        "aten_mul": lambda: mul(x, x),
        "aten_mul_out": lambda: mul_out(x, x, out=y),
    }
    if out := case.out:
        calls["out"] = out
    times = medians(calls, rounds=15, least=0.005)
    times["replayed"] /= REPLAYED
    us = taken(times, "functional", "out", "replayed", "aten_mul", "aten_mul_out")
    return {"op": op, "sample": case.sample.name, **us}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "host-cost.csv", ops=op_names())
    options = parser.parse_args(argv)
    with Results(options.out) as results, threads_set_to(1), torch.no_grad():
        for op in options.ops:
            results.add(measure(op))


if __name__ == "__main__":
    main()
