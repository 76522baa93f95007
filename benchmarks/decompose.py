"""Ops as calls or as aten ops that Inductor fuses: the measurement behind torch_infini.compile.DECOMPOSED.

    python benchmarks/decompose.py        # results/CPU/decompose.csv

Each op alone and with a product with a tensor behind it (`fused`), 512 x 4096, one thread; the two forms take turns,
medians count. The ratio is the time as aten ops over that of the call: above 1 the call is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Cases, Row, dtype_name, taken
from op_cases import OpInfo, info_of, op_names
from torch import Tensor

from torch_infini import compile as infini_compile
from torch_infini.testing.benchmark import Call, medians


def compiled(info: OpInfo, args: tuple[Any, ...], other: Tensor | None, decompose: tuple[str, ...]) -> Call:
    def function(*args: Any) -> Tensor:
        result = info.op(*args)
        result = result[0] if isinstance(result, tuple) else result
        return result if other is None else result * other

    torch._dynamo.reset()
    made = torch.compile(function, backend="infini", options={"decompose": decompose})  # type: ignore[dict-item]
    made(*args)
    return lambda: made(*args)


def arguments(info: OpInfo, dtype: torch.dtype) -> tuple[Any, ...]:
    """Two-dimensional tensors of the size measured where the op's samples have them."""
    x, y = (torch.randn(512, 4096, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    tensors = {"x": x, "gate": x, "other": y, "up": y, "residual": y, "weight": y[0], "min": -1.0, "max": 1.0}
    return tuple(tensors[name] for name in info.arguments if name in tensors)


def measure(info: OpInfo, dtype: torch.dtype, fused: bool) -> Row:
    args = arguments(info, dtype)
    other = torch.ones(512, 4096, dtype=dtype) if fused else None
    calls = {"call": compiled(info, args, other, ()), "aten": compiled(info, args, other, (info.name,))}
    times = medians(calls, rounds=11)
    default = "aten" if info.name in infini_compile.DECOMPOSED else "call"
    return {**taken(times, *calls), "ratio": times["aten"] / times["call"], "default": default}


def cases() -> Cases:
    for info in map(info_of, op_names()):
        for dtype in (torch.bfloat16, torch.float32) if info.decomposition else ():
            for fused in (False, True):
                key = {"op": info.name, "dtype": dtype_name(dtype), "fused": fused, "threads": 1}
                yield key, partial(measure, info, dtype, fused)


def main(argv: Sequence[str] | None = None) -> None:
    harness.run(harness.new_parser(__doc__, "decompose.csv").parse_args(argv), cases())


if __name__ == "__main__":
    main()
