"""Gemm of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference(c: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float) -> dict[str, Tensor]:
    product = alpha * (a.double() @ b.double())
    return {"c": product + beta * c.double() if beta != 0 else product}


def matrix(rows: int, columns: int, dtype: torch.dtype, by_columns: bool = False, batch: int | None = None) -> Tensor:
    lead = () if batch is None else (batch,)
    if by_columns:
        return torch.randn(*lead, columns, rows).to(dtype).transpose(-1, -2)
    return torch.randn(*lead, rows, columns).to(dtype)


def tensors(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    layout: str = "nnn",
    batch: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> dict[str, Any]:
    """`layout`: for c, a and b, n: row by row, t: column by column."""
    c, a, b = (letter == "t" for letter in layout)
    return {
        "c": matrix(m, n, dtype, c, batch),
        "a": matrix(m, k, dtype, a, batch),
        "b": matrix(k, n, dtype, b, batch),
        "alpha": alpha,
        "beta": beta,
    }


def tolerance(dtype: torch.dtype, k: int) -> tuple[float, float]:
    """One rounding of the result, and float sums of k products around 1, which may cancel."""
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    return relative, 1e-6 * max(k, 4) ** 0.75


# Around the edges of register tiles, and one beyond each block size.
SIZES = (
    (1, 1, 1),
    (1, 40, 70),
    (40, 1, 70),
    (3, 5, 7),
    (8, 47, 64),
    (13, 17, 19),
    (15, 33, 129),
    (33, 64, 31),
    (49, 97, 260),
)


def samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        for m, n, k in SIZES:
            for layout in ("nnn", "nnt", "ntn", "tnn", "ttt"):
                yield CSample(f"{kind} {m}x{n}x{k} {layout}", tensors(m, n, k, dtype, layout), tolerance(dtype, k))
        for m, n, k in ((130, 200, 700), (2, 530, 1100), (1, 1030, 2100), (260, 70, 1300)):
            yield CSample(f"{kind} {m}x{n}x{k}", tensors(m, n, k, dtype), tolerance(dtype, k))
            yield CSample(f"{kind} {m}x{n}x{k} nnt", tensors(m, n, k, dtype, "nnt"), tolerance(dtype, k))
        for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
            yield CSample(f"{kind} empty {m}x{n}x{k}", tensors(m, n, k, dtype), tolerance(dtype, k))
        yield CSample(f"{kind} k 0 and beta", tensors(5, 7, 0, dtype, beta=0.5), tolerance(dtype, 1))
        for layout in ("nnn", "ttt"):
            args = tensors(21, 35, 50, dtype, layout, alpha=-0.75, beta=0.5)
            yield CSample(f"{kind} alpha and beta {layout}", args, tolerance(dtype, 50))
        args = tensors(21, 35, 50, dtype)
        args["c"].fill_(torch.nan)
        yield CSample(f"{kind} beta 0 does not read c", args, tolerance(dtype, 50))
        args = tensors(21, 35, 50, dtype)
        args["a"][3, 4] = torch.nan
        args["b"][4, 8] = torch.inf
        yield CSample(f"{kind} NaN and infinity", args, tolerance(dtype, 50))
        yield CSample(f"{kind} batch", tensors(9, 20, 33, dtype, batch=3, beta=1.0), tolerance(dtype, 33))
        args = tensors(9, 20, 33, dtype, "ntn", batch=4)
        args["a"] = args["a"][:1]
        yield CSample(f"{kind} one a for the batch", args, tolerance(dtype, 33))
        args = tensors(9, 20, 33, dtype, "nnt", batch=4)
        args["b"] = args["b"][:1].expand(4, 33, 20)
        yield CSample(f"{kind} b of batch stride 0", args, tolerance(dtype, 33))
        args = tensors(9, 20, 33, dtype)
        args["a"], args["c"] = torch.randn(9, 50).to(dtype)[:, 3:36], torch.zeros(9, 41, dtype=dtype)[:, 7:27]
        yield CSample(f"{kind} padded rows", args, tolerance(dtype, 33))
        args = tensors(1, 1, 1, dtype)
        args["a"] = Described(args["a"], (1, 1), (7, 7))
        yield CSample(f"{kind} one element with any strides", args, tolerance(dtype, 1))


def errors() -> Iterator[CErrorCase]:
    args = tensors(4, 6, 8, torch.float32)
    op = "infini::gemm: "
    yield CErrorCase(
        "float64",
        {**args, "c": args["c"].double(), "a": args["a"].double(), "b": args["b"].double()},
        "BAD_TENSOR_DTYPE",
        op + "c must be float32, bfloat16 or float16, got float64",
    )
    yield CErrorCase(
        "dtypes differ",
        {**args, "a": args["a"].half()},
        "BAD_TENSOR_DTYPE",
        op + "a must have the dtype of c, float32, got float16",
    )


C_OPS = [COp("Gemm", ["c"], reference, samples, errors)]
