"""LPNorm of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(output: Tensor, input: Tensor, axis: int, p: int, eps: float) -> dict[str, Tensor]:
    x = input.double()
    if x.numel() == 0:
        return {"output": x}
    top = x.abs().amax(axis, keepdim=True)
    unit = torch.where((top > 0) & (top < torch.inf), top, 1)
    norm = (x / unit).abs().pow(p).sum(axis, keepdim=True).pow(1 / p) * unit
    return {"output": x / (norm + eps)}


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, axis: int = -1, p: int = 2) -> dict[str, Any]:
    x = torch.randn(shape).to(dtype)
    return {"output": filled(shape, dtype), "input": x, "axis": axis, "p": p, "eps": 1e-6}


def special(dtype: torch.dtype) -> Tensor:
    """Rows that are zero, infinite, NaN, tiny, and whose squares no float holds."""
    x = torch.randn(6, 40).to(dtype)
    x[0] = 0
    x[1, 3] = torch.inf
    x[2, 3] = torch.nan
    x[3] *= torch.finfo(dtype).tiny
    x[4] = torch.finfo(dtype).max
    return x


def samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]
        for p in (1, 2, 3, 4, 7):
            for axis in range(-3, 3):
                yield CSample(f"{kind} p {p} axis {axis}", tensors((3, 50, 37), dtype, axis, p))
        for p in (1, 2, 3, 1000, 2**31 - 1):
            yield CSample(f"{kind} p {p} special", {**tensors((6, 40), dtype, 1, p), "input": special(dtype)})
            yield CSample(
                f"{kind} p {p} special, eps 0", {**tensors((6, 40), dtype, 1, p), "input": special(dtype), "eps": 0.0}
            )
        for shape in ((1,), (769,), (1, 1), (0, 8), (8, 0), (1, 2, 1, 3, 2, 1, 2, 5), (130, 2048)):
            yield CSample(f"{kind} {shape}", tensors(shape, dtype))
        for axis in (0, 1):
            args = tensors((20, 37), dtype, axis)
            args["input"] = torch.randn(37, 20).to(dtype).T
            yield CSample(f"{kind} transposed, axis {axis}", args)
            args = tensors((5, 40), dtype, axis)
            args["output"] = filled((5, 80), dtype)[:, ::2]
            yield CSample(f"{kind} strided output, axis {axis}", args)
            args = tensors((6, 45), dtype, axis)
            args["input"] = Described(args["input"], (6, 45), (-45, 1), 5 * 45)
            args["output"] = Described(args["output"], (6, 45), (45, -1), 44)
            yield CSample(f"{kind} negative strides, axis {axis}", args)
            args = tensors((7, 33), dtype, axis)
            args["input"] = args["input"][:, :1].expand(7, 33)
            yield CSample(f"{kind} a broadcast column, axis {axis}", args)
            args = tensors((40, 70), dtype, axis)
            args["output"] = args["input"]
            yield CSample(f"{kind} in place, axis {axis}", args)


def errors() -> Iterator[CErrorCase]:
    args = tensors((4, 8), torch.float32)
    op = "infini::lp_norm: "
    for p in (0, -2):
        yield CErrorCase(f"p {p}", {**args, "p": p}, "BAD_PARAM", op + f"p must be at least 1, got {p}")
    for axis in (2, -3):
        yield CErrorCase(
            f"axis {axis}", {**args, "axis": axis}, "BAD_PARAM", op + f"axis must be in [-2, 1], got {axis}"
        )
    yield CErrorCase(
        "eps",
        {**args, "eps": float("inf")},
        "BAD_PARAM",
        op + "eps must be a finite number of at least 0, got inf",
    )
    yield CErrorCase(
        "float64",
        {**args, "input": torch.ones(4, 8, dtype=torch.float64)},
        "BAD_TENSOR_DTYPE",
        op + "input must be float32, bfloat16 or float16, got float64",
    )
    yield CErrorCase(
        "dtypes differ",
        {**args, "output": torch.ones(4, 8, dtype=torch.float16)},
        "BAD_TENSOR_DTYPE",
        op + "output must have the dtype of input, float32, got float16",
    )
    yield CErrorCase(
        "shapes differ",
        {**args, "output": torch.ones(4, 7)},
        "BAD_TENSOR_SHAPE",
        op + "output must have the shape of input, [4, 8], got [4, 7]",
    )
    yield CErrorCase(
        "broadcast output",
        {**args, "output": torch.ones(4, 1).expand(4, 8)},
        "BAD_TENSOR_STRIDES",
        op + "output must not be a broadcast view, for it is written to, got strides [1, 0]",
    )
    buffer = torch.ones(5, 8)
    yield CErrorCase(
        "overlap",
        {**args, "input": buffer[:4], "output": buffer[1:]},
        "BAD_PARAM",
        op + "output must be input itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [COp("LPNorm", ["output"], reference, samples, errors)]
