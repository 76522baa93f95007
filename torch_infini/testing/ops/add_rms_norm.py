"""add_rms_norm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from ...ops.add_rms_norm import SPEC
from ...ops.rms_norm import ROUNDINGS, order_of
from ..c_door import c_op
from ..c_ops import CErrorCase, CSample
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .rms_norm import INFO as NORM
from .rms_norm import norm_inputs, normalized
from .rms_norm import peer as norm_peer


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    # float + float is exact in float64, so this rounds once.
    wide = x.double() + residual.double()
    h = wide.to(x.dtype).double()
    summed = wide if rounding >= ROUNDINGS["wide_once"] else h
    return normalized(summed, x.dtype, weight, eps, order_of(rounding)), h


def peer(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> tuple[Tensor, Tensor]:
    """Compute it as Hugging Face's models do."""
    h = x + residual
    return norm_peer(h, weight, eps, rounding), h


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = norm_inputs(dtype, *shape)
    return x, norm_inputs(dtype, *shape, seed=1)[0], weight


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", inputs(dtype, 3, n))
    yield Sample("one dimension", inputs(dtype, 64))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 4, 32))
    yield Sample("no rows", inputs(dtype, 0, 16))
    yield Sample("no columns", inputs(dtype, 4, 0))
    yield Sample("large", inputs(dtype, 300, 2048))
    for rounding, number in ROUNDINGS.items():
        x, residual, weight = inputs(dtype, 5, 100)
        yield Sample(rounding, (x, residual, weight, 1e-5, number))
        yield Sample(f"{rounding}, float32 weight", (x, residual, weight.float(), 1e-5, number))
    yield Sample("long rows, wide sum", (*inputs(dtype, 2, 16387), 1e-5, ROUNDINGS["wide_once"]))


def errors() -> Iterator[ErrorCase]:
    x, residual, weight = inputs(torch.float32, 2, 16)
    op = "infini::add_rms_norm: "
    yield ErrorCase(
        "residual shape", (x, residual[:1], weight), op + "residual must have the shape of x, [2, 16], got [1, 16]"
    )
    yield ErrorCase(
        "residual dtype",
        (x, residual.half(), weight),
        op + "residual must have the dtype of x, float32, got float16",
    )
    yield ErrorCase(
        "weight too long",
        (x, residual, torch.ones(17)),
        op + "weight must have shape [16] to match the last dimension of x, got [17]",
    )
    yield ErrorCase(
        "strided columns",
        (x[:, ::2], residual[:, ::2], weight[:8]),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase(
        "negative eps", (x, residual, weight, -0.5), op + "eps must be a finite number of at least 0, got -0.5"
    )
    same = torch.empty(2, 16)
    yield ErrorCase(
        "one output for two",
        (x, residual, weight),
        op + "out0 must share no memory with out1, got one whose span of memory overlaps it",
        {"out0": same, "out1": same},
    )
    weight = torch.ones(16)
    yield ErrorCase(
        "a sum that is the weight",
        (x[0], residual[0], weight),
        op + "out1 must share no memory with weight, got one whose span of memory overlaps it",
        {"out0": torch.empty(16), "out1": weight},
    )


def cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Cost:
    return Cost(bytes=nbytes(x, residual, weight, x, x), flops=5 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((512, 4096), (16384, 4096), (1, 2048)):
        yield Sample(f"{rows}x{columns}", (*inputs(dtype, rows, columns), 1e-6, ROUNDINGS["llama"]))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=NORM.tolerances,
)


def c_samples() -> Iterator[Sample]:
    """Yield calls with float64, and with weights of the other half type."""
    pairs = ((torch.float64, torch.float64), (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16))
    for dtype, of_weight in pairs:
        x, residual, weight = inputs(dtype, 2, 3, 769)
        yield Sample(f"{dtype} by {of_weight}", (x, residual, weight.to(of_weight)))


def c_in_place() -> Iterator[CSample]:
    """Yield calls with each output over one of the inputs."""
    for dtype in INFO.dtypes:
        x, residual, weight = inputs(dtype, 7, 96)
        args = {"y": x, "a": x, "b": residual, "weight": weight, "epsilon": 1e-5, "residual_out": residual}
        yield CSample(f"{dtype} in place", args, INFO.tolerances[dtype])


def c_errors() -> Iterator[CErrorCase]:
    x, residual, weight = inputs(torch.float32, 4, 8)
    yield CErrorCase(
        "no residual_out",
        {"y": x, "a": x, "b": residual, "weight": weight, "epsilon": 1e-5, "residual_out": None},
        "BAD_PARAM",
        "infiniopCreateAddRMSNormDescriptor: residual_out_desc must not be NULL",
    )


C_OPS = [
    c_op(
        INFO,
        "AddRMSNorm",
        ["y", "residual_out"],
        {"x": "a", "residual": "b", "eps": "epsilon"},
        {"rounding": 0},
        samples=lambda: chain(c_samples(), c_in_place()),
        errors=c_errors,
    )
]
