"""geglu: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.geglu import SPEC, formula
from ..op_info import OpInfo
from .silu import as_held_by
from .swiglu import bench, cost, errors, halves, samples


def reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate64, up64 = (t.double() for t in halves(gate, up))
    return as_held_by(gate.dtype, formula(gate64, up64))


def peer(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = halves(gate, up)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=lambda dtype: samples(dtype, vanishes=-9),
    errors=lambda: errors("geglu"),
    cost=cost,
    bench=bench,
    peer=peer,
)
