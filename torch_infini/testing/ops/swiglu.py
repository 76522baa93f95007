"""swiglu: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.swiglu import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .silu import activations, as_held_by, special_values


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (gate, up), whichever form they are passed in."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1) if gate.shape[-1] else (gate, gate)
    return first, second


def reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate64, up64 = (t.double() for t in halves(gate, up))
    return as_held_by(gate.dtype, gate64 / (1 + torch.exp(-gate64)) * up64)


def peer(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = halves(gate, up)
    return torch.nn.functional.silu(gate) * up


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return activations(dtype, *shape), activations(dtype, *shape, seed=1)


def samples(dtype: torch.dtype, vanishes: float = -80) -> Iterator[Sample]:
    """Yield calls of a gated op; `vanishes`: the gate below which its factor may be 0 in float32 but not in float64."""
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", inputs(dtype, 3, n))
    for n in (2, 14, 1538, 10250):
        yield Sample(f"{n} columns, fused", (activations(dtype, 3, n),))
    yield Sample("one dimension", inputs(dtype, 300_001))
    yield Sample("one dimension, fused", (activations(dtype, 300_002),))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 4, 32))
    yield Sample("four dimensions, fused", (activations(dtype, 2, 3, 4, 32),))
    yield Sample("scalars", inputs(dtype))
    yield Sample("strided columns, fused", (activations(dtype, 5, 1538)[:, ::2][:, :768],))
    yield Sample("transposed", (activations(dtype, 40, 40), activations(dtype, 40, 40, seed=1).t()))
    yield Sample("float64", inputs(torch.float64, 3, 40))
    yield Sample("no rows", inputs(dtype, 0, 16))
    yield Sample("no columns", inputs(dtype, 4, 0))
    yield Sample("no columns, fused", (activations(dtype, 4, 0),))
    yield Sample("large", inputs(dtype, 300, 2048))
    yield Sample("large, fused", (activations(dtype, 300, 4096),))
    yield Sample("dense from -20 to 20", (torch.linspace(-20, 20, 40_001).to(dtype), activations(dtype, 40_001)))
    gate = special_values(dtype)
    for factor in (1.0, -2.0, 0.0, torch.nan):
        yield Sample(f"special values by {factor}", (gate, torch.full_like(gate, factor)))
    # Below about -88 the sigmoid is 0 in float32 (also in torch), and 0 times infinity is NaN; in float64 it is not 0.
    gate = gate[~(gate < vanishes)]
    yield Sample("special values by inf", (gate, torch.full_like(gate, torch.inf)))


def errors(name: str = "swiglu") -> Iterator[ErrorCase]:
    """Yield the calls that the gated op `name` rejects."""
    gate, up = inputs(torch.float32, 2, 16)
    op = f"infini::{name}: "
    integers = op + "gate must be float32, bfloat16, float16 or float64, got int64"
    yield ErrorCase("integers", (gate.long(), up), integers)
    yield ErrorCase("integers, fused", (gate.long(),), integers)
    yield ErrorCase("up dtype", (gate, up.half()), op + "up must have the dtype of gate, float32, got float16")
    yield ErrorCase("up shape", (gate, up[:1]), op + "up must have the shape of gate, [2, 16], got [1, 16]")
    yield ErrorCase(
        "odd, fused",
        (gate[:, :15],),
        op + "gate must have an even last dimension, gate and up side by side, where up is not given, got [2, 15]",
    )
    yield ErrorCase("scalar, fused", (gate[0, 0],), op + "gate must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("meta up", (gate, up.to("meta")), op + "up must be on the device of gate, cpu, got meta")
    yield ErrorCase(
        "out shape, fused",
        (gate,),
        op + "out must have the shape of gate, [2, 8], got [2, 16]",
        {"out": torch.empty(2, 16)},
    )
    yield ErrorCase(
        "out overlaps up",
        (gate[:1], up[:1]),
        op + "out must be up itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": up.view(-1)[1:17].view(1, 16)},
    )


def cost(gate: Tensor, up: Tensor | None = None) -> Cost:
    first, second = halves(gate, up)
    return Cost(bytes=nbytes(first, second, first), flops=5 * first.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((512, 4096), (16384, 4096), (1, 2048), (512, 11008)):
        yield Sample(f"{rows}x{columns}", inputs(dtype, rows, columns))
    for rows, columns in ((512, 11008), (1, 2048)):
        yield Sample(f"{rows}x{columns} fused", (activations(dtype, rows, 2 * columns),))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
)
