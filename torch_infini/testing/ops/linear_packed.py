"""linear_packed: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops._packed import packed_shape, put_rows, unpack_linear
from ...ops.linear_packed import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import INFO as LINEAR
from .linear import inputs as plain_inputs


def reference(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    return LINEAR.reference(x, unpack_linear(weight, n, x.shape[-1]), bias)


def peer(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """Unpack in every call. benchmarks/packed.py compares with a weight in torch's layout."""
    return torch.nn.functional.linear(x, unpack_linear(weight, n, x.shape[-1]), bias)


def inputs(
    dtype: torch.dtype, *rows: int, k: int, n: int, bias: bool = False
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Make (x, weight, n, bias). Padding rows are NaN, so that a kernel that uses them fails its test."""
    x, weight, b = plain_inputs(dtype, *rows, k=k, n=n, bias=bias)
    packed = torch.full(packed_shape(n, k), torch.nan, dtype=dtype)
    put_rows(packed, weight)
    return x, packed, n, b


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 2, 7, 31, 64, 769, 5125):
        yield Sample(f"{k} columns", inputs(dtype, 1, k=k, n=19))
    for n in (1, 47, 48, 49, 96, 500):
        yield Sample(f"{n} rows of the weight", inputs(dtype, 1, k=70, n=n, bias=True))
    for rows in (*range(2, 12), 18, 19, 28):
        yield Sample(f"{rows} rows", inputs(dtype, rows, k=333, n=61, bias=True))
    yield Sample("several blocks of columns", inputs(dtype, 20, k=2500, n=100))
    yield Sample("a row, several blocks of columns", inputs(dtype, 1, k=2500, n=100, bias=True))
    yield Sample("one dimension", inputs(dtype, k=65, n=33, bias=True))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, k=96, n=70))
    yield Sample("one output column", inputs(dtype, 2, k=40, n=1, bias=True))
    yield Sample("no rows", inputs(dtype, 0, k=16, n=8))
    yield Sample("no outputs", inputs(dtype, 4, k=16, n=0))
    yield Sample("no columns", inputs(dtype, 4, k=0, n=20))
    yield Sample("no columns, bias", inputs(dtype, 4, k=0, n=20, bias=True))
    x, packed, _, bias = inputs(dtype, 3, k=30, n=200, bias=True)
    assert bias is not None
    yield Sample("the first rows of a weight", (x, packed, 50, bias[:50]))
    yield Sample("several threads", inputs(dtype, 2, k=1024, n=1100, bias=True))
    yield Sample("many rows", inputs(dtype, 3, 50, k=256, n=200, bias=True))
    yield Sample("more rows than one pass has", inputs(dtype, 1030, k=33, n=50, bias=True))


def errors() -> Iterator[ErrorCase]:
    x, weight, n, bias = inputs(torch.bfloat16, 2, k=16, n=8, bias=True)
    assert bias is not None
    op = "infini::linear_packed: "
    yield ErrorCase("scalar", (x[0, 0], weight, n), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float32", (x.float(), weight, n), op + "x must be bfloat16, got float32")
    yield ErrorCase("weight rank", (x, weight[0], n), op + "weight must have 4 dimensions, got 3 (shape [8, 48, 2])")
    yield ErrorCase("weight dtype", (x, weight.half(), n), op + "weight must be bfloat16, got float16")
    yield ErrorCase(
        "weight of other columns",
        (x[:, :13], weight, n),
        op + "weight must have shape [1, 7, 48, 2] of panels of 48 rows, two elements a word, got [1, 8, 48, 2]",
    )
    yield ErrorCase(
        "weight is a part",
        (x[:, :8], torch.cat((weight, weight))[:, :4], n),
        op + "weight must be contiguous, got strides [768, 96, 2, 1]",
    )
    for wrong in (-1, 49):
        yield ErrorCase(
            f"n {wrong}",
            (x, weight, wrong),
            op + f"n must be 0 to 48, the rows that weight has room for, got {wrong}",
        )
    yield ErrorCase(
        "x's columns apart",
        (torch.cat((x, x), 1)[:, ::2], weight, n),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
    )
    yield ErrorCase(
        "bias too long",
        (x, weight, n, torch.ones(9, dtype=torch.bfloat16)),
        op + "bias must have shape [8] to match n, got [9]",
    )
    yield ErrorCase(
        "bias dtype",
        (x, weight, n, bias.half()),
        op + "bias must have the dtype of x, bfloat16, or float32, got float16",
    )
    yield ErrorCase(
        "bias strides",
        (x, weight, n, torch.ones(16, dtype=torch.bfloat16)[::2]),
        op + "bias must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
    )
    yield ErrorCase("meta weight", (x, weight.to("meta"), n), op + "weight must be on the device of x, cpu, got meta")

    def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        return {"out": torch.empty(shape, dtype=dtype)}

    yield ErrorCase(
        "out shape",
        (x, weight, n),
        op + "out must have shape [2, 8], the rows of x by n, got [8, 2]",
        out(8, 2),
    )
    yield ErrorCase(
        "out dtype",
        (x, weight, n),
        op + "out must have the dtype of x, bfloat16, got float16",
        out(2, 8, dtype=torch.half),
    )
    yield ErrorCase(
        "out strides",
        (x, weight, n),
        op + "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 2]",
        {"out": torch.empty(8, 2, dtype=torch.bfloat16).t()},
    )
    yield ErrorCase(
        "out is a broadcast view",
        (x, weight, n),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8, dtype=torch.bfloat16).expand(2, 8)},
    )
    inside = {"x": x.view(-1)[:16], "weight": weight.view(-1)[:16]}
    for name, memory in inside.items():
        yield ErrorCase(
            f"out overlaps {name}",
            (x, weight, n),
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": memory.view(2, 8)},
        )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], weight, n, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 8)},
    )


def cost(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Cost:
    rows, k = x.shape[:-1].numel(), x.shape[-1]
    return Cost(bytes=nbytes(x, bias) + (n * k + rows * n) * x.element_size(), flops=2 * rows * n * k)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    shapes = [(1, 2048, 5632), (1, 5632, 2048), (1, 2048, 32000)]
    shapes += [(rows, 2048, 5632) for rows in (4, 8, 16, 32)] + [(512, 2048, 2048)]
    for rows, k, n in shapes:
        yield Sample(f"{rows}x{k}->{n}", inputs(dtype, rows, k=k, n=n))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=(torch.bfloat16,),
    tolerances=LINEAR.tolerances,
)
