"""What a call of an op costs beside its kernel: every op on its smallest sample, beside aten.mul; writes CSV.

    python benchmarks/host_cost.py

One thread, float32 where the op has it; functional and out forms in turns with aten.mul and its out form, medians. And
what a call takes in a replayed program (torch_infini.runtime.program) of 256 such calls, its kernel included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_infini.runtime import program
from torch_infini.testing import as_tuple, threads_set_to
from torch_infini.testing.benchmark import medians, results_of, write_csv
from torch_infini.testing.ops import OP_INFOS, OpInfo, Sample, all_op_infos

RESULTS = results_of(__file__)
REPLAYED = 256  # calls of one program


@dataclass
class Row:
    """One line of the CSV, in microseconds; no out form where the op writes into its arguments."""

    op: str
    sample: str
    functional_us: float
    out_us: float | None
    replayed_us: float
    aten_mul_us: float
    aten_mul_out_us: float


def smallest(spec: OpInfo) -> Sample:
    """The sample with the least work that is not empty."""
    samples = list(spec.samples(spec.dtypes[0]))
    costs = [spec.cost(*s.args, **s.kwargs) for s in samples]
    tensors = [[t for t in s.args if isinstance(t, torch.Tensor)] for s in samples]
    full = [i for i, ts in enumerate(tensors) if all(t.numel() for t in ts)]
    return samples[min(full, key=lambda i: costs[i].bytes + costs[i].flops)]


def measure(spec: OpInfo) -> Row:
    sample = smallest(spec)
    op, args, kwargs = spec.op, sample.args, sample.kwargs
    x = torch.randn(8)
    y = torch.empty_like(x)
    mul, mul_out = torch.ops.aten.mul.Tensor, torch.ops.aten.mul.out

    def repeated() -> None:
        for _ in range(REPLAYED):
            op(*args, **kwargs)

    calls = {
        "functional": lambda: op(*args, **kwargs),
        "replayed": program(repeated).replay,
        "mul": lambda: mul(x, x),
        "mul out": lambda: mul_out(x, x, out=y),
    }
    if spec.outputs:
        out, results = spec.out, dict(zip(spec.out_names, as_tuple(op(*args, **kwargs)), strict=True))
        calls["out"] = lambda: out(*args, **kwargs, **results)
    times = medians(calls, rounds=15, least=0.005)
    us = {name: 1e6 * value for name, value in times.items()}
    replayed = us["replayed"] / REPLAYED
    return Row(spec.name, sample.name, us["functional"], us.get("out"), replayed, us["mul"], us["mul out"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "host-cost.csv")
    parser.add_argument("--ops", help="names, separated by commas (default: all)")
    options = parser.parse_args(argv)
    specs = [OP_INFOS[name] for name in options.ops.split(",")] if options.ops else all_op_infos()
    with threads_set_to(1), torch.no_grad():
        rows = [measure(spec) for spec in specs]
    write_csv(options.out, rows, Row)
    for row in rows:
        out = "    -" if row.out_us is None else f"{row.out_us:5.2f}"
        print(f"{row.op:24} {row.functional_us:5.2f} us, out {out} us, replayed {row.replayed_us:.2f} us; "
              f"aten.mul {row.aten_mul_us:.2f}, {row.aten_mul_out_us:.2f} us ({row.sample})")  # fmt: skip
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
