"""add_lora: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ops.add_lora import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
    found = y.double()
    for t, slot in enumerate(index.tolist()):
        if slot >= 0:
            found[t] += x[t].double() @ a[slot].double().T @ b[slot].double()
    return found


def peer(y: Tensor, x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> None:
    """Compute the rows of each adapter by two products of torch."""
    for slot in index.unique().tolist():
        if slot >= 0:
            rows = index == slot
            y[rows] += x[rows] @ a[slot].T @ b[slot]


def inputs(
    dtype: torch.dtype, index: Sequence[int], k: int, n: int, rank: int = 8, slots: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(index) + k + n + rank)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    a, b = random(slots, rank, k, scale=max(k, 1) ** -0.5), random(slots, rank, n, scale=max(rank, 1) ** -0.5)
    return random(len(index), n), random(len(index), k), a, b, torch.tensor(index, dtype=torch.int64)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    mixed = [1, -1, 0, 2, 1, -7, 1]
    yield Sample("one row", inputs(dtype, [2], 64, 96))
    yield Sample("odd sizes", inputs(dtype, mixed, 769, 131, rank=5))
    yield Sample("sizes of one", inputs(dtype, mixed, 1, 1, rank=1))
    yield Sample("several blocks of columns", inputs(dtype, [0, -1, 2], 130, 1100, rank=17))
    yield Sample("one adapter for many rows", inputs(dtype, [1] * 70, 96, 80, rank=64))
    y, x, a, b, index = inputs(dtype, mixed, 96, 200)
    yield Sample("a part of the columns", (y[:, 30:150], x[:, 8:72], a[..., 8:72], b[..., 40:160], index))
    yield Sample("int32", (*inputs(dtype, mixed, 64, 64)[:4], index.int()))
    yield Sample("strided index", (*inputs(dtype, mixed, 64, 64)[:4], index.repeat_interleave(2)[::2]))
    yield Sample("no adapter", inputs(dtype, [-1, -1], 64, 64))
    yield Sample("no slots", inputs(dtype, [-1, -2], 64, 64, slots=0))
    yield Sample("no rows", inputs(dtype, [], 64, 64))
    yield Sample("no columns of x", inputs(dtype, [0, 1], 0, 64))
    yield Sample("no columns of y", inputs(dtype, [0, 1], 64, 0))
    yield Sample("rank 0", inputs(dtype, [0, 1], 64, 64, rank=0))


def errors() -> Iterator[ErrorCase]:
    op = "infini::add_lora: "
    y, x, a, b, index = inputs(torch.float32, [0, -1, 2], 16, 24, rank=4)
    yield ErrorCase("rank of x", (y, x[0], a, b, index), op + "x must have 2 dimensions, got 1 (shape [16])")
    yield ErrorCase(
        "float64",
        (y.double(), x.double(), a.double(), b.double(), index),
        op + "x must be float32, bfloat16 or float16, got float64",
    )
    yield ErrorCase(
        "columns of a",
        (y, x, a[..., :8], b, index),
        op + "a must have shape [3, 4, 16] to match the columns of x, got [3, 4, 8]",
    )
    yield ErrorCase("dtype of a", (y, x, a.half(), b, index), op + "a must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "rows of y", (y[:2], x, a, b, index), op + "y must have shape [3, 24] to match the rows of x, got [2, 24]"
    )
    yield ErrorCase(
        "rank of b",
        (y, x, a, b[:, :3], index),
        op + "b must have shape [3, 4, 24] to match a and the columns of y, got [3, 3, 24]",
    )
    yield ErrorCase(
        "length of index",
        (y, x, a, b, index[:2]),
        op + "index must have shape [3] to match the rows of x, got [2]",
    )
    yield ErrorCase("floating index", (y, x, a, b, index.float()), op + "index must be int64 or int32, got float32")
    yield ErrorCase(
        "a slot that is not there",
        (y, x, a, b, torch.tensor([0, 3, 4])),
        op + "index must be below 0 or less than 3, the slots of a, got 3 for row 1",
        of_values=True,
    )
    both = torch.randn(3, 40)
    yield ErrorCase(
        "y in x",
        (both[:, 8:32], both[:, :16], a, b, index),
        op + "y must share no memory with x, got one whose span of memory overlaps it",
    )


def cost(y: Tensor, x: Tensor, a: Tensor, b: Tensor, index: Tensor) -> Cost:
    _, rank, k = a.shape
    rows, n = y.shape
    adapters = nbytes(a[:1], b[:1]) * len(index.unique())
    return Cost(bytes=2 * nbytes(y) + nbytes(x, index) + adapters, flops=2 * rows * rank * (k + n))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows in (1, 8, 512):
        index = [t % 4 if rows < 512 else 0 for t in range(rows)]
        yield Sample(f"{rows}x2048->2048, rank 16", inputs(dtype, index, 2048, 2048, rank=16, slots=4))


INFO = OpInfo(**vars(SPEC), reference=reference, samples=samples, errors=errors, cost=cost, bench=bench, peer=peer)
