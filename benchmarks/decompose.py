"""Ops as calls or as aten ops that Inductor fuses: the measurement behind torch_infini.compile.DECOMPOSED; writes CSV.

    python benchmarks/decompose.py

Each op alone and with a pointwise operation behind it, 512 x 4096, one thread; the two forms take turns, medians count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_infini import compile as infini_compile
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import Call, medians, results_of, write_csv
from torch_infini.testing.ops import OpInfo, all_op_infos

RESULTS = results_of(__file__)


@dataclass
class Row:
    """One line of the CSV, in microseconds; `fused`: a product with a tensor follows the op."""

    op: str
    dtype: str
    fused: bool
    call_us: float
    aten_us: float
    ratio: float  # aten over call: above 1 the call is faster
    default: str


def compiled(spec: OpInfo, args: tuple[Any, ...], other: Tensor | None, decompose: tuple[str, ...]) -> Call:
    def function(*args: Any) -> Tensor:
        result = spec.op(*args)
        result = result[0] if isinstance(result, tuple) else result
        return result if other is None else result * other

    torch._dynamo.reset()
    made = torch.compile(function, backend="infini", options={"decompose": decompose})
    made(*args)
    return lambda: made(*args)


def arguments(spec: OpInfo, dtype: torch.dtype) -> tuple[Any, ...]:
    """Two-dimensional tensors of the size measured where the op's samples have them."""
    x, y = (torch.randn(512, 4096, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    tensors = {"x": x, "gate": x, "other": y, "up": y, "residual": y, "weight": y[0], "min": -1.0, "max": 1.0}
    return tuple(tensors[name] for name in spec.arguments if name in tensors)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "decompose.csv")
    options = parser.parse_args(argv)
    rows = []
    with threads_set_to(1), torch.no_grad():
        for spec in all_op_infos():
            for dtype in (torch.bfloat16, torch.float32) if spec.decomposition else ():
                for fused in (False, True):
                    args = arguments(spec, dtype)
                    other = torch.ones(512, 4096, dtype=dtype) if fused else None
                    calls = {"call": compiled(spec, args, other, ()), "aten": compiled(spec, args, other, (spec.name,))}
                    us = {name: 1e6 * value for name, value in medians(calls, rounds=11).items()}
                    name = str(dtype).removeprefix("torch.")
                    form = "aten" if spec.name in infini_compile.DECOMPOSED else "call"
                    rows.append(Row(spec.name, name, fused, us["call"], us["aten"], us["aten"] / us["call"], form))
                    print(f"{spec.name:14} {name:9} {'fused' if fused else 'alone'}: call {us['call']:7.1f} us, aten "
                          f"{us['aten']:7.1f} us; default {form}", flush=True)  # fmt: skip
    write_csv(options.out, rows, Row)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
