"""matmul: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.matmul import SPEC, fake, values
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import accumulation_error


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.double(), b.double())


def peer(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def factors(dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Make (a, b) of these shapes, such that results have a spread of 1."""
    return values(dtype, *a), values(dtype, *b, seed=1, scale=max(a[-1], 1) ** -0.5)


# Small ones, some around the edges of the register tiles, and some beyond each algorithm's and block's size.
SIZES = ((3, 5, 7), (1, 40, 70), (40, 1, 70), (13, 17, 19), (49, 97, 260), (2, 530, 1100), (130, 200, 1100))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for m, n, k in SIZES:
        yield Sample(f"{m}x{n}x{k}", factors(dtype, (m, k), (k, n)))
    for m, n, k in ((1, 40, 1030), (33, 64, 131), (100, 70, 60)):
        a, b = factors(dtype, (m, k), (k, n))
        yield Sample(f"{m}x{n}x{k}, b by columns", (a, b.t().contiguous().t()))
        yield Sample(f"{m}x{n}x{k}, a by columns", (a.t().contiguous().t(), b))
    for name, of_a, of_b in (
        ("batch", (3, 9, 33), (3, 33, 20)),
        ("a b for each inner batch", (2, 3, 9, 33), (3, 33, 20)),
        ("one b for the batch", (2, 3, 9, 33), (33, 20)),
        ("one a for the batch", (9, 33), (2, 3, 33, 20)),
        ("one row each and one b", (5, 1, 33), (33, 20)),
        ("broadcast both ways", (2, 1, 4, 9, 33), (3, 1, 33, 20)),
        ("a batch of one", (1, 9, 33), (4, 33, 20)),
        ("two vectors", (70,), (70,)),
        ("matrix and vector", (40, 70), (70,)),
        ("vector and matrix", (70,), (70, 40)),
        ("batch and vector", (2, 3, 40, 70), (70,)),
        ("vector and batch", (70,), (2, 70, 40)),
        ("eight dimensions", (2, 1, 1, 2, 1, 2, 3, 5), (2, 1, 2, 1, 2, 1, 5, 4)),
        ("no rows", (0, 7), (7, 5)),
        ("no columns", (5, 7), (7, 0)),
        ("k of 0", (2, 5, 0), (0, 7)),
        ("two vectors of length 0", (0,), (0,)),
        ("empty batch", (0, 5, 7), (7, 3)),
        ("several threads", (2, 64, 130), (2, 130, 200)),
    ):
        yield Sample(name, factors(dtype, of_a, of_b))
    queries, keys = factors(dtype, (2, 40, 3, 32), (2, 50, 3, 32))
    yield Sample("heads of attention", (queries.transpose(1, 2), keys.permute(0, 2, 3, 1)))
    a, b = factors(dtype, (9, 33), (33, 20))
    yield Sample("expanded", (a.expand(2, 3, 9, 33), b.expand(2, 3, 33, 20)))
    a, b = factors(dtype, (9, 33), (33, 20))
    a[3, 4], b[4, 8], b[5, 2] = torch.nan, torch.inf, -torch.inf
    yield Sample("NaN and infinity", (a, b))


def errors() -> Iterator[ErrorCase]:
    a, b = factors(torch.float32, (4, 8), (8, 6))
    op = "infini::matmul: "
    yield ErrorCase("scalar", (a[0, 0], b), op + "a must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (a.double(), b), op + "a must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("dtypes differ", (a, b.half()), op + "b must have the dtype of a, float32, got float16")
    yield ErrorCase(
        "depths differ",
        (a, b[:7]),
        op + "b must have 8 rows, as a has columns, got 7 (shapes [4, 8] and [7, 6])",
    )
    yield ErrorCase(
        "batches differ",
        (a.expand(2, 4, 8), b.expand(3, 8, 6)),
        op + "b must have leading dimensions that broadcast with those of a, shape [2, 4, 8], got shape [3, 8, 6]",
    )
    yield ErrorCase(
        "a neither by rows nor by columns",
        (a[:, ::2], b[:4]),
        op + "a must have stride 1 in one of its last two dimensions, got strides [8, 2]",
    )
    yield ErrorCase(
        "b neither by rows nor by columns",
        (a[:, :4], b[::2, ::2]),
        op + "b must have stride 1 in one of its last two dimensions, got strides [12, 2]",
    )
    yield ErrorCase("meta b", (a, b.to("meta")), op + "b must be on the device of a, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (a, b),
        op + "out must have the shape of a @ b, [4, 6], got [4, 7]",
        {"out": torch.empty(4, 7)},
    )
    yield ErrorCase(
        "out dtype",
        (a, b),
        op + "out must have the dtype of a, float32, got bfloat16",
        {"out": torch.empty(4, 6).bfloat16()},
    )
    yield ErrorCase(
        "out strides",
        (a, b),
        op + "out must have stride 1 in one of its last two dimensions, got strides [12, 2]",
        {"out": torch.empty(4, 12)[:, ::2]},
    )
    yield ErrorCase(
        "broadcast out",
        (a, b),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(6).expand(4, 6)},
    )
    square = factors(torch.float32, (8, 8), (8, 8))
    for name, tensor in zip("ab", square, strict=True):
        yield ErrorCase(
            f"out is {name}",
            square,
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": tensor},
        )


def cost(a: Tensor, b: Tensor) -> Cost:
    out = fake(a.to("meta"), b.to("meta"))
    return Cost(bytes=nbytes(a, b, out), flops=2 * out.numel() * a.shape[-1])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for m, k, n in ((1, 4096, 4096), (8, 4096, 4096), (512, 2048, 2048)):
        yield Sample(f"{m}x{k}x{n}", factors(dtype, (m, k), (k, n)))
    yield Sample("1x4096x4096, b by columns", (values(dtype, 1, 4096), values(dtype, 4096, 4096, seed=1).t()))
    scores = factors(dtype, (32, 512, 64), (32, 64, 512))
    yield Sample("32x512x64x512", scores)


def cuda_slack(expected: Tensor, a: Tensor, b: Tensor) -> Tensor:
    size = reference(a.double().square(), b.double().square()).sqrt()
    return accumulation_error(size, a.dtype, a.shape[-1])


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={
        torch.float32: (1e-6, 2e-6),
        torch.bfloat16: (2**-8, 3e-6),
        torch.float16: (2**-11, 3e-6),
    },
    same_bits_on_cuda=False,
    cuda_slack=cuda_slack,
)
