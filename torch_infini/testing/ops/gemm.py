"""gemm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import FLOATS
from ...ops.gemm import SPEC
from ...ops.matmul import values
from ..c_door import all_but, c_op
from ..c_ops import CErrorCase, CSample, Described
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
    """Make (a, b, c) of these shapes, such that a @ b and c have a spread of 1."""
    return *factors(dtype, a, b), values(dtype, *c, seed=2)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for m, n, k in SIZES:
        yield Sample(f"{m}x{n}x{k}", (*terms(dtype, (m, k), (k, n), (m, n)), -0.75, 0.5))
    yield Sample("without c", factors(dtype, (13, 33), (33, 20)))
    yield Sample("without c, alpha", (*factors(dtype, (13, 33), (33, 20)), None, 0.3))
    for name, *shapes in (
        ("batch", (3, 9, 33), (3, 33, 20), (3, 9, 20)),
        ("batches in two dimensions", (2, 3, 9, 33), (3, 33, 20), (2, 3, 9, 20)),
        ("one c for the batch", (2, 3, 9, 33), (33, 20), (9, 20)),
        ("bias", (9, 33), (33, 20), (20,)),
        ("column of c", (9, 33), (33, 20), (9, 1)),
        ("scalar c", (2, 9, 33), (33, 20), ()),
        ("vector", (9, 33), (33,), (9,)),
        ("k of 0", (5, 0), (0, 7), (5, 7)),
        ("no rows", (0, 7), (7, 5), (0, 5)),
        ("no columns", (5, 7), (7, 0), (5, 0)),
    ):
        yield Sample(name, (*terms(dtype, *shapes), 1.5, 0.25))
    a, b, c = terms(dtype, (9, 33), (33, 20), (20, 9))
    yield Sample("c by columns", (a, b, c.t(), 1.0, 1.0))
    a, b, c = terms(dtype, (9, 33), (33, 20), (9, 20))
    yield Sample("every second element of c", (a, b, torch.stack([c, c], -1).flatten(1)[:, ::2], 1.0, -1.0))
    c[2] = torch.nan
    yield Sample("NaN in c", (a, b, c, 1.0, 1.0))
    yield Sample("beta 0 does not read c", (a, b, c))
    yield Sample("alpha 0", (a, b, terms(dtype, (9, 33), (33, 20), (9, 20))[2], 0.0, 2.0))
    a, b, c = terms(dtype, (9, 33), (33, 20), (9, 20))
    a[3, 4], b[4, 8], b[5, 2] = torch.nan, torch.inf, -torch.inf
    yield Sample("NaN and infinity in a and b", (a, b, c, 1.0, 1.0))


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
    slack = abs(alpha) * matmul_slack(expected, a, b)
    if beta == 0 or a.dtype.itemsize > 2:
        return slack
    # On an H100 cuBLAS rounds the product to the half type before it adds c.
    return slack + torch.finfo(a.dtype).eps / 2 * abs(alpha) * MATMUL.reference(a, b).abs()


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


def to_c(args: dict[str, Any]) -> dict[str, Any] | None:
    """Take matrices or batches of them; c is given in the result's shape, and written."""
    a, b, c = (args[name] for name in "abc")
    if not a.dim() == b.dim() in (2, 3) or (c is None and args["beta"] != 0):
        return None
    shape = (*map(max, a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if c is None:
        c = a.new_full(shape, torch.nan)
    if c.shape != shape or 1 not in c.stride()[-2:]:
        c = c.expand(shape).contiguous()
    return {**args, "c": c}


def by_columns(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "by rows", args
    for names in ("c", "a", "b", "cab"):
        yield f"{names} by columns", {**args, **{name: by_columns(args[name]) for name in names}}


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield sizes around the edges of register tiles, and one beyond each block size."""
    sizes = (1, 1, 1), (3, 5, 7), (8, 47, 64), (13, 17, 19), (15, 33, 129), (33, 64, 31), (49, 97, 260)
    for m, n, k in (*sizes, (1, 40, 70), (40, 1, 70)):
        yield Sample(f"{m}x{n}x{k}", factors(dtype, (m, k), (k, n)))
    yield Sample("alpha and beta", (*terms(dtype, (21, 50), (50, 35), (21, 35)), -0.75, 0.5))
    yield Sample("a batch with beta", (*terms(dtype, (3, 9, 33), (3, 33, 20), (3, 9, 20)), 1.0, 1.0))


def c_samples() -> Iterator[Sample | CSample]:
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        for m, n, k, layouts in (
            (1, 1030, 2100, "rows columns"),
            (260, 70, 1300, "rows columns"),
            (2, 530, 1100, "columns"),
            (130, 200, 1100, "columns"),
        ):
            a, b = factors(dtype, (m, k), (k, n))
            for layout in layouts.split():
                yield Sample(f"{label} {m}x{n}x{k}, b by {layout}", (a, by_columns(b) if layout == "columns" else b))
        a, b, c = terms(dtype, (1, 9, 33), (4, 33, 20), (4, 9, 20))
        yield Sample(f"{label} one a for the batch", (by_columns(a), b, c, 1.0, 1.0))
        yield Sample(f"{label} b of batch stride 0", (a.expand(4, 9, 33), by_columns(b[:1]).expand(4, 33, 20)))
        one = {name: t.view(1, 1) for name, t in zip("abc", terms(dtype, (1,), (1,), (1,)), strict=True)}
        args = {**one, "a": Described(one["a"], (1, 1), (7, 7)), "alpha": 1.0, "beta": 0.0}
        yield CSample(f"{label} one element with any strides", args)


def c_errors() -> Iterator[CErrorCase]:
    """Yield calls that must fail. c comes first: a and b must match its dtype and shape."""
    a, b, c = terms(torch.float32, (4, 8), (8, 6), (4, 6))
    args: dict[str, Any] = {"c": c, "a": a, "b": b, "alpha": 1.0, "beta": 0.0}
    double = {name: args[name].double() for name in "abc"}
    for name, changed, status, rule in (
        ("float64", double, "DTYPE", "c must be float32, bfloat16 or float16, got float64"),
        ("a dtype", {"a": a.half()}, "DTYPE", "a must have the dtype of c, float32, got float16"),
        ("b dtype", {"b": b.bfloat16()}, "DTYPE", "b must have the dtype of c, float32, got bfloat16"),
        ("c of four dimensions", {"c": c[None, None]}, "SHAPE",
         "c must have 2 to 3 dimensions, got 4 (shape [1, 1, 4, 6])"),
        ("a batch for one c", {"a": a[None]}, "SHAPE", "a must have 2 dimensions, got 3 (shape [1, 4, 8])"),
        ("rows differ", {"a": a[:3]}, "SHAPE", "a must have shape [4, 8] to match the rows of c, got [3, 8]"),
        ("depths differ", {"b": b[:7]}, "SHAPE",
         "b must have shape [8, 6] to match the columns of a and of c, got [7, 6]"),
        ("broadcast c", {"c": c[:1].expand(4, 6)}, "STRIDES",
         "c must not be a broadcast view, for it is written to, got strides [0, 1]"),
        ("c neither by rows nor by columns", {"c": torch.ones(4, 12)[:, ::2]}, "STRIDES",
         "c must have stride 1 in one of its last two dimensions, got strides [12, 2]"),
    ):  # fmt: skip
        yield CErrorCase(name, args | changed, f"BAD_TENSOR_{status}", "infini::gemm: " + rule)


C_OPS = [
    c_op(
        INFO,
        "Gemm",
        ["c"],
        samples=c_samples,
        errors=c_errors,
        to_c=to_c,
        updates=["c"],
        words={"out": "c"},
        refuses=all_but(
            *("integers", "depths differ", "c dtype", "c shape", "c of more dimensions", "alpha", "beta"),
            *("out shape", "out overlaps c", "out is a row of c"),
        ),
        variants=c_layouts,
        varied=c_varied,
    )
]
