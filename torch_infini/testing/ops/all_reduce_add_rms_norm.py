"""all_reduce_add_rms_norm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...ops.all_reduce_add_rms_norm import NAME, SPEC
from ..op_info import Cost, ErrorCase, OpInfo
from .add_rms_norm import INFO as NORM
from .add_rms_norm import inputs


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0, group: int = 0
) -> tuple[Tensor, Tensor]:
    return NORM.reference(x, residual, weight, eps, rounding)


def peer(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0, group: int = 0
) -> tuple[Tensor, Tensor]:
    return NORM.peer(x, residual, weight, eps, rounding)


def cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0, group: int = 0) -> Cost:
    return NORM.cost(x, residual, weight, eps, rounding)


def errors() -> Iterator[ErrorCase]:
    for case in NORM.errors():
        yield replace(case, message=case.message.replace("infini::add_rms_norm", f"infini::{NAME}"))
    yield ErrorCase(
        "no such group",
        (*inputs(torch.float32, 2, 16), 1e-6, 0, 123456),
        f"infini::{NAME}: group must be 0 (this process by itself) or what torch_infini.distributed.communicator gave "
        "for a process group that is still there, got 123456",
    )


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=NORM.samples,
    errors=errors,
    cost=cost,
    bench=NORM.bench,
    peer=peer,
    tolerances=NORM.tolerances,
)
