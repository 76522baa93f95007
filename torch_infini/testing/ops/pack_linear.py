"""pack_linear: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops._packed import packed_shape, put_rows
from ...ops.pack_linear import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import inputs as of_linear


def peer(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    put_rows(packed, weight, first_row)


def reference(packed: Tensor, weight: Tensor, first_row: int = 0) -> tuple[Tensor]:
    after = packed.clone()
    peer(after, weight, first_row)
    return (after.double(),)


def inputs(dtype: torch.dtype, n: int, k: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Make (packed, weight): `rows` rows of a weight, for a packed one with room for n."""
    packed = torch.full(packed_shape(n, k), 77, dtype=dtype)
    return packed, of_linear(dtype, 1, k=k, n=n if rows is None else rows)[1]


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 2, 7, 31, 32, 33, 64, 769):
        yield Sample(f"{k} columns", inputs(dtype, 50, k))
    for n in (1, 15, 16, 17, 47, 48, 49, 96, 150):
        yield Sample(f"{n} rows", inputs(dtype, n, 34))
    for rows, first_row in ((1, 0), (1, 49), (5, 14), (16, 16), (20, 44), (90, 3), (96, 0), (0, 96)):
        yield Sample(f"{rows} rows from {first_row} on", (*inputs(dtype, 96, 39, rows), first_row))
    packed, weight = inputs(dtype, 60, 40)
    yield Sample("rows apart", (packed, torch.cat((weight, weight), 1)[:, :40], 0))
    yield Sample("no rows", inputs(dtype, 0, 8))
    yield Sample("no columns", inputs(dtype, 8, 0))
    yield Sample("several threads", (*inputs(dtype, 1100, 1024, 1080), 7))


def errors() -> Iterator[ErrorCase]:
    packed, weight = inputs(torch.bfloat16, 48, 16)
    op = "infini::pack_linear: "
    yield ErrorCase("weight rank", (packed, weight[0]), op + "weight must have 2 dimensions, got 1 (shape [16])")
    yield ErrorCase("weight dtype", (packed, weight.float()), op + "weight must be bfloat16, got float32")
    yield ErrorCase(
        "weight's columns apart",
        (packed[:, :4].contiguous(), weight[:, ::2]),
        op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase("packed rank", (packed[0], weight), op + "packed must have 4 dimensions, got 3 (shape [8, 48, 2])")
    yield ErrorCase("packed dtype", (packed.half(), weight), op + "packed must be bfloat16, got float16")
    yield ErrorCase(
        "other columns",
        (packed, weight[:, :13]),
        op + "packed must have shape [1, 7, 48, 2] of panels of 48 rows, two elements a word, got [1, 8, 48, 2]",
    )
    yield ErrorCase(
        "packed is a part",
        (torch.cat((packed, packed))[:, :4], weight[:, :8]),
        op + "packed must be contiguous, got strides [768, 96, 2, 1]",
    )
    for first_row in (-1, 1):
        yield ErrorCase(
            f"from {first_row} on",
            (packed, weight, first_row),
            op + f"first_row must leave room for 48 of the 48 rows of packed, got {first_row}",
        )
    yield ErrorCase(
        "meta weight", (packed, weight.to("meta")), op + "weight must be on the device of packed, cpu, got meta"
    )
    yield ErrorCase(
        "packed overlaps weight",
        (packed, packed.view(48, 16)),
        op + "packed must share no memory with weight, got one whose span of memory overlaps it",
    )


def cost(packed: Tensor, weight: Tensor, first_row: int = 0) -> Cost:
    return Cost(bytes=2 * nbytes(weight))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("5632x2048", inputs(dtype, 5632, 2048))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=(torch.bfloat16,),
)
