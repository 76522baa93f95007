"""What a call of an op costs beside its kernel: every op on its smallest sample, beside aten.mul.

    python benchmarks/host_cost.py        # results/CPU/host-cost.csv

One thread, float32 where the op has it; functional and out forms (no out form where the op writes into its arguments)
in turns with aten.mul and its out form, medians. And what a call takes in a replayed program
(torch_infini.runtime.program) of 256 such calls, its kernel included.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import harness
import torch
from harness import Cases, Row, taken
from op_cases import Case, op_names, smallest_case

from torch_infini.runtime import program
from torch_infini.testing.benchmark import medians

REPLAYED = 256  # calls of one program


def measure(case: Case) -> Row:
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
    return taken(times, "functional", "out", "replayed", "aten_mul", "aten_mul_out")


def cases(ops: Sequence[str]) -> Cases:
    for case in map(smallest_case, ops):
        yield {"op": case.info.name, "sample": case.sample.name, "threads": 1}, partial(measure, case)


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.new_parser(__doc__, "host-cost.csv", ops=op_names()).parse_args(argv)
    harness.run(options, cases(options.ops))


if __name__ == "__main__":
    main()
