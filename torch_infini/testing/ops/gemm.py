"""gemm: reference, samples, refused calls, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.gemm import SPEC
from ...ops.matmul import values
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .matmul import INFO as MATMUL
from .matmul import SIZES, factors
from .matmul import cuda_slack as matmul_slack


def reference(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    y = alpha * MATMUL.reference(a, b)
    return y if c is None or beta == 0 else y + beta * c.double()


def peer(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    if c is not None and a.dim() == b.dim() == 2:
        return torch.addmm(c, a, b, alpha=alpha, beta=beta)
    y = torch.matmul(a, b)
    y = y if alpha == 1 else alpha * y
    return y if c is None or beta == 0 else y + beta * c


def terms(
    dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, c) of these shapes, such that a @ b and c have a spread of 1."""
    return *factors(dtype, a, b), values(dtype, *c, seed=2)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for m, n, k in SIZES:
        yield Sample(f"{m}x{n}x{k}", (*terms(dtype, (m, k), (k, n), (m, n)), -0.75, 0.5))
    yield Sample("without c", factors(dtype, (13, 33), (33, 20)))
    yield Sample("without c, alpha", (*factors(dtype, (13, 33), (33, 20)), None, 0.3))
    for name, a, b, c in (
        ("batch", (3, 9, 33), (3, 33, 20), (3, 9, 20)),
        ("batches in two dimensions", (2, 3, 9, 33), (3, 33, 20), (2, 3, 9, 20)),
        ("one c for the batch", (2, 3, 9, 33), (33, 20), (9, 20)),
        ("bias", (9, 33), (33, 20), (20,)),
        ("column of c", (9, 33), (33, 20), (9, 1)),
        ("scalar c", (2, 9, 33), (33, 20), ()),
        ("vector", (9, 33), (33,), (9,)),
        ("k of 0", (5, 0), (0, 7), (5, 7)),
        ("no rows", (0, 7), (7, 5), (0, 5)),
    ):
        yield Sample(name, (*terms(dtype, a, b, c), 1.5, 0.25))
    a, b, c = terms(dtype, (9, 33), (33, 20), (20, 9))
    yield Sample("c by columns", (a, b, c.t(), 1.0, 1.0))
    a, b, c = terms(dtype, (9, 33), (33, 20), (9, 20))
    yield Sample("every second element of c", (a, b, torch.stack([c, c], -1).flatten(1)[:, ::2], 1.0, -1.0))
    c[2] = torch.nan
    yield Sample("NaN in c", (a, b, c, 1.0, 1.0))
    yield Sample("beta 0 does not read c", (a, b, c))
    yield Sample("alpha 0", (a, b, terms(dtype, (9, 33), (33, 20), (9, 20))[2], 0.0, 2.0))


def errors() -> Iterator[ErrorCase]:
    a, b, c = terms(torch.float32, (4, 8), (8, 6), (4, 6))
    op = "infini::gemm: "
    yield ErrorCase("integers", (a.int(), b), op + "a must be float32, bfloat16 or float16, got int32")
    yield ErrorCase(
        "depths differ", (a, b[:7]), op + "b must have 8 rows, as a has columns, got 7 (shapes [4, 8] and [7, 6])"
    )
    yield ErrorCase(
        "neither by rows nor by columns",
        (a[:, ::2], b[:4]),
        op + "a must have stride 1 in one of its last two dimensions, got strides [8, 2]",
    )
    yield ErrorCase("c dtype", (a, b, c.half(), 1.0, 1.0), op + "c must have the dtype of a, float32, got float16")
    yield ErrorCase(
        "c shape",
        (a, b, c[:3], 1.0, 1.0),
        op + "c must have a shape that broadcasts to that of a @ b, [4, 6], got [3, 6]",
    )
    yield ErrorCase(
        "c of more dimensions",
        (a, b, c[None], 1.0, 1.0),
        op + "c must have a shape that broadcasts to that of a @ b, [4, 6], got [1, 4, 6]",
    )
    yield ErrorCase("no c", (a, b, None, 1.0, 1.0), op + "c must be a tensor where beta is not 0, got None")
    yield ErrorCase("alpha", (a, b, c, float("inf")), op + "alpha must be a finite number, got inf")
    yield ErrorCase("beta", (a, b, c, 1.0, float("nan")), op + "beta must be a finite number, got nan")
    yield ErrorCase(
        "out shape", (a, b), op + "out must have the shape of a @ b, [4, 6], got [6, 4]", {"out": torch.empty(6, 4)}
    )
    wide = torch.empty(5, 6)
    yield ErrorCase(
        "out overlaps c",
        (a, b, wide[1:], 1.0, 1.0),
        op + "out must be c itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": wide[:4]},
    )
    yield ErrorCase(
        "out is a row of c",
        (a[:1], b[:, :6], c, 1.0, 1.0),
        op + "c must have a shape that broadcasts to that of a @ b, [1, 6], got [4, 6]",
        {"out": c[:1]},
    )
    square = factors(torch.float32, (8, 8), (8, 8))
    yield ErrorCase(
        "out is a",
        square,
        op + "out must share no memory with a, got one whose span of memory overlaps it",
        {"out": square[0]},
    )


def cost(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Cost:
    of_product = MATMUL.cost(a, b)
    return Cost(bytes=of_product.bytes + (nbytes(c) if beta != 0 else 0), flops=of_product.flops)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for m, k, n in ((1, 2048, 5632), (8, 2048, 5632), (512, 2048, 2048)):
        yield Sample(f"{m}x{k}x{n}, residual", (*terms(dtype, (m, k), (k, n), (m, n)), 1.0, 1.0))
    yield Sample("512x2048x2048, bias", (*terms(dtype, (512, 2048), (2048, 2048), (2048,)), 1.0, 1.0))


def cuda_slack(
    expected: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    return abs(alpha) * matmul_slack(expected, a, b)


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=MATMUL.tolerances,
    same_bits_on_cuda=False,
    cuda_slack=cuda_slack,
)
