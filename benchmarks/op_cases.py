"""The calls of ops that benchmarks time, and what goes with them: torch's way to the same, and the least work.

The only module of benchmarks/ that reads the descriptions of ops; the others take what it yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_infini.testing import as_tuple
from torch_infini.testing.benchmark import Call
from torch_infini.testing.op_info import nbytes
from torch_infini.testing.ops import OP_INFOS, Cost, OpInfo, Sample
from torch_infini.testing.ops._int8_cache import quantize as quantize_rows
from torch_infini.testing.ops.paged_attention import inputs as paged_inputs
from torch_infini.testing.ops.paged_attention import quantized as quantize_caches

__all__ = [
    "Case",
    "Cost",
    "OpInfo",
    "Sample",
    "bench_cases",
    "info_of",
    "nbytes",
    "op_names",
    "paged_inputs",
    "quantize_caches",
    "quantize_rows",
    "smallest_case",
]


@dataclass(frozen=True)
class Case:
    """An op and the arguments of a call."""

    info: OpInfo
    sample: Sample

    def call_of(self, function: Callable[..., Any]) -> Call:
        args, kwargs = self.sample.args, self.sample.kwargs
        return lambda: function(*args, **kwargs)

    @property
    def functional(self) -> Call:
        return self.call_of(self.info.op)

    @property
    def out(self) -> Call | None:
        """The out form, into what the functional form has returned; an op that writes into its arguments has none."""
        if not self.info.outputs:
            return None
        out, args, kwargs = self.info.out, self.sample.args, self.sample.kwargs
        results = dict(zip(self.info.out_names, as_tuple(self.functional()), strict=True))
        return lambda: out(*args, **kwargs, **results)

    @property
    def peer(self) -> Callable[..., Any]:
        """What a user would write in plain torch; takes the op's arguments."""
        return self.info.peer

    @property
    def cost(self) -> Cost:
        """The least work of the call."""
        return self.info.cost(*self.sample.args, **self.sample.kwargs)


def op_names() -> list[str]:
    return sorted(OP_INFOS)


def info_of(name: str) -> OpInfo:
    return OP_INFOS[name]


def bench_cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    """The calls that the op is timed with."""
    info = OP_INFOS[name]
    return (Case(info, sample) for sample in info.bench(dtype))


def smallest_case(name: str) -> Case:
    """The sample with the least work that is not empty."""
    info = OP_INFOS[name]
    cases = [Case(info, sample) for sample in info.samples(info.dtypes[0])]
    full = [c for c in cases if all(t.numel() for t in c.sample.args if isinstance(t, torch.Tensor))]
    return min(full, key=lambda case: case.cost.bytes + case.cost.flops)
