"""lp_norm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.lp_norm import SPEC
from ..c_door import c_op
from ..c_layouts import every_layout
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._along_a_dim import refused_dims, refused_inputs, refused_out_dtype, refused_outs


def reference(x: Tensor, p: int = 2, dim: int = -1, eps: float = 1e-12) -> Tensor:
    x64 = x.double()
    if x64.numel() == 0:
        return x64
    # Relative to the largest |x|, high powers neither overflow nor all vanish in float64.
    top = x64.abs().amax(dim, keepdim=True)
    unit = torch.where((top > 0) & (top < torch.inf), top, 1)
    norm = (x64 / unit).abs().pow(p).sum(dim, keepdim=True).pow(1 / p) * unit
    return x64 / (norm + eps)


def peer(x: Tensor, p: int = 2, dim: int = -1, eps: float = 1e-12) -> Tensor:
    return torch.nn.functional.normalize(x, p, dim, eps)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def special_values(dtype: torch.dtype) -> Tensor:
    """Make rows that are zero, infinite, NaN or tiny, and rows whose squares no float can hold."""
    x = values(dtype, 6, 40)
    x[0] = 0
    x[1, 3] = torch.inf
    x[2, 3] = torch.nan
    x[3] *= torch.finfo(dtype).tiny
    x[4] = torch.finfo(dtype).max
    return x


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (values(dtype, 3, n),))
    yield Sample("one dimension", (values(dtype, 64),))
    for p in (1, 2, 3, 4, 7):
        for dim in range(-3, 3):
            yield Sample(f"p {p}, dimension {dim} of three", (values(dtype, 3, 50, 37), p, dim))
    for p in (1, 2, 3, 1000, 2**31 - 1, 2**40):
        for eps in (1e-6, 0.0):
            yield Sample(f"p {p}, eps {eps}, special values", (special_values(dtype), p, -1, eps))
    yield Sample("eight dimensions", (values(dtype, 1, 2, 1, 3, 4, 1, 2, 5), 2, 4))
    yield Sample("an eps that shows", (values(dtype, 3, 16), 2, -1, 0.5))
    yield Sample("no rows", (values(dtype, 0, 16),))
    yield Sample("no columns", (values(dtype, 4, 0),))
    yield Sample("large", (values(dtype, 150, 2048),))
    yield Sample("large, along the rows", (values(dtype, 150, 2000), 2, 0))
    yield Sample("strided columns", (values(dtype, 4, 90)[:, ::2],))
    yield Sample("transposed", (values(dtype, 50, 20).t(),))
    yield Sample("a broadcast x", (values(dtype, 1, 9).expand(4, 9), 2, 0))


def errors() -> Iterator[ErrorCase]:
    x = values(torch.float32, 3, 8)
    op = "infini::lp_norm: "
    yield from refused_inputs(op, x)
    for p in (0, -2):
        yield ErrorCase(f"p {p}", (x, p), op + f"p must be at least 1, got {p}")
    yield from refused_dims(op, x, 2)
    for eps in (-1.0, float("inf"), float("nan")):
        text = op + f"eps must be a finite number of at least 0, got {eps:g}"
        yield ErrorCase(f"eps {eps}", (x, 2, -1, eps), text)
    yield from refused_outs(op, x)
    yield refused_out_dtype(op, x)


def cost(x: Tensor, p: int = 2, dim: int = -1, eps: float = 1e-12) -> Cost:
    return Cost(bytes=2 * nbytes(x), flops=(2 + 2 * p.bit_length()) * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x4096", (values(dtype, 512, 4096),))
    yield Sample("512x32x128", (values(dtype, 512, 32, 128),))
    yield Sample("1x2048", (values(dtype, 1, 2048),))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
)


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    for dim in (0, 1):
        yield Sample(f"two dimensions, along {dim}", (values(dtype, 20, 37), 2, dim, 1e-6))
    yield Sample("four dimensions, along 1", (values(dtype, 5, 4, 3, 6), 3, 1, 1e-6))


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return every_layout(args, ["output"])


C_OPS = [
    c_op(
        INFO,
        "LPNorm",
        ["output"],
        {"x": "input", "dim": "axis"},
        words={"out": "output", "x": "input", "dim": "axis"},
        variants=c_layouts,
        varied=c_varied,
    )
]
