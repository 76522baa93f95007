"""silu: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.silu import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def as_held_by(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Replace float64 values that round to an infinity of the dtype by that infinity."""
    return torch.where(value.to(dtype).isinf(), value * torch.inf, value)


def reference(x: Tensor) -> Tensor:
    x64 = x.double()
    return as_held_by(x.dtype, x64 / (1 + torch.exp(-x64)))


def peer(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def activations(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Make values as a layer's output, with a spread of 3 and a few large ones; integers use all bits."""
    g = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, generator=g, dtype=dtype)
    x = torch.randn(shape, generator=g) * 3
    if x.dim():
        x[..., ::97] *= 20
    return x.to(dtype)


def special_values(dtype: torch.dtype) -> Tensor:
    """Make zeros, the smallest and largest numbers, infinities, NaN, and values whose e^-x leaves float32's range."""
    info = torch.finfo(dtype)
    few = [0.0, info.tiny, info.smallest_normal * 2, 1.0, 20.0, info.max / 2, info.max, torch.inf]
    edge = torch.linspace(80, 110, 301).tolist()
    values = torch.tensor(few + edge, dtype=torch.float64)
    return torch.cat([values, -values, torch.tensor([torch.nan], dtype=torch.float64)]).to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (activations(dtype, 3, n),))
    yield Sample("scalar", (activations(dtype),))
    yield Sample("one dimension", (activations(dtype, 300_001),))
    yield Sample("four dimensions", (activations(dtype, 2, 3, 4, 32),))
    yield Sample("transposed", (activations(dtype, 769, 5).t(),))
    yield Sample("broadcast", (activations(dtype, 5, 1).expand(5, 300),))
    yield Sample("float64", (activations(torch.float64, 3, 40),))
    yield Sample("no rows", (activations(dtype, 0, 16),))
    yield Sample("no columns", (activations(dtype, 4, 0),))
    yield Sample("large", (activations(dtype, 300, 2048),))
    yield Sample("dense from -20 to 20", (torch.linspace(-20, 20, 40_001).to(dtype),))
    yield Sample("special values", (special_values(dtype),))


def errors() -> Iterator[ErrorCase]:
    x = activations(torch.float32, 2, 16)
    op = "infini::silu: "
    yield ErrorCase("integers", (x.int(),), op + "x must be float32, bfloat16, float16 or float64, got int32")
    yield ErrorCase(
        "out shape", (x,), op + "out must have the shape of x, [2, 16], got [2, 15]", {"out": torch.empty(2, 15)}
    )
    yield ErrorCase(
        "out dtype",
        (x,),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty_like(x).half()},
    )
    yield ErrorCase(
        "out broadcast",
        (x,),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(1, 16).expand(2, 16)},
    )
    yield ErrorCase(
        "out overlaps",
        (x[:1],),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": x.view(-1)[1:17].view(1, 16)},
    )


def cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(x), flops=4 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((512, 4096), (16384, 4096), (1, 2048)):
        yield Sample(f"{rows}x{columns}", (activations(dtype, rows, columns),))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
)
