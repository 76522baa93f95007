"""Softmax, LogSoftmax and CausalSoftmax of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A spread as attention scores have it."""
    return (torch.randn(shape) * 3).to(dtype)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def special(dtype: torch.dtype) -> Tensor:
    x = scores(7, 21, dtype=dtype)
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 3] = torch.nan
    x[4] += 3e4  # would overflow without the maximum
    x[5] -= 3e4  # all would vanish without the maximum
    return x


def layouts(y_dtype: torch.dtype, x_dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """y and x of one shape in which rows are no longer than columns, of every kind of strides."""

    def pair(y: Any, x: Any) -> dict[str, Any]:
        return {"y": y, "x": x}

    yield "transposed x", pair(filled((20, 37), y_dtype), scores(37, 20, dtype=x_dtype).T)
    yield "transposed y", pair(filled((37, 20), y_dtype).T, scores(20, 37, dtype=x_dtype))
    yield "every other element", pair(filled((5, 80), y_dtype)[:, ::2], scores(5, 120, dtype=x_dtype)[:, 1::3])
    yield (
        "permuted",
        pair(filled((41, 3, 7), y_dtype).permute(1, 2, 0), scores(3, 41, 7, dtype=x_dtype).transpose(1, 2)),
    )
    yield (
        "negative strides",
        pair(
            Described(filled((6, 45), y_dtype), (6, 45), (45, -1), 44),
            Described(scores(6, 45, dtype=x_dtype), (6, 45), (-45, 1), 5 * 45),
        ),
    )
    yield "a broadcast row", pair(filled((4, 33), y_dtype), scores(1, 33, dtype=x_dtype).expand(4, 33))
    yield "a broadcast column", pair(filled((4, 33), y_dtype), scores(4, 1, dtype=x_dtype).expand(4, 33))


def softmax_reference(y: Tensor, x: Tensor, axis: int) -> dict[str, Tensor]:
    return {"y": torch.softmax(x.double(), axis)}


def softmax_samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]
        for shape in ((1,), (769,), (1, 1), (4, 512), (2, 3, 5125), (0, 8), (8, 0)):
            yield CSample(f"{kind} {shape}", {"y": filled(shape, dtype), "x": scores(*shape, dtype=dtype), "axis": -1})
        for axis in range(-3, 3):
            x = scores(3, 50, 37, dtype=dtype)
            yield CSample(f"{kind} axis {axis}", {"y": filled((3, 50, 37), dtype), "x": x, "axis": axis})
        for axis in (0, 1):
            for layout, args in layouts(dtype, dtype):
                yield CSample(f"{kind} {layout}, axis {axis}", {**args, "axis": axis})
            x = scores(40, 70, dtype=dtype)
            yield CSample(f"{kind} in place, axis {axis}", {"y": x, "x": x, "axis": axis})
        x = scores(1, 2, 1, 3, 4, 1, 2, 5, dtype=dtype)
        yield CSample(f"{kind} eight dimensions", {"y": filled(tuple(x.shape), dtype), "x": x, "axis": 4})
        yield CSample(f"{kind} special", {"y": filled((7, 21), dtype), "x": special(dtype), "axis": 1})
        x = scores(150, 2048, dtype=dtype)
        yield CSample(f"{kind} large", {"y": filled((150, 2048), dtype), "x": x, "axis": 1})
        yield CSample(f"{kind} large, columns", {"y": filled((150, 1000), dtype), "x": x[:, :1000], "axis": 0})


def log_softmax_reference(y: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {"y": torch.log_softmax(x.double(), -1)}


def log_softmax_samples() -> Iterator[CSample]:
    for y_dtype in FLOATS:
        for x_dtype in FLOATS:
            kind = f"{str(x_dtype)[6:]} to {str(y_dtype)[6:]}"
            for shape in ((1,), (1, 1), (4, 512), (2, 3, 769), (0, 8), (8, 0)):
                yield CSample(f"{kind} {shape}", {"y": filled(shape, y_dtype), "x": scores(*shape, dtype=x_dtype)})
            for layout, args in layouts(y_dtype, x_dtype):
                yield CSample(f"{kind} {layout}", args)
            yield CSample(f"{kind} special", {"y": filled((7, 21), y_dtype), "x": special(x_dtype)})
    for dtype in FLOATS:
        x = scores(7, 96, dtype=dtype)
        yield CSample(f"{dtype} in place", {"y": x, "x": x})
        x = scores(150, 2048, dtype=dtype)
        yield CSample(f"{dtype} large", {"y": filled((150, 2048), dtype), "x": x})


def hidden(x: Tensor) -> Tensor:
    """[q, k]: True where a column is later than the row's token."""
    q, k = x.shape[-2:]
    return torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)


def causal_reference(y: Tensor, x: Tensor) -> dict[str, Tensor]:
    mask = hidden(x)
    return {"y": torch.softmax(x.double().masked_fill(mask, -torch.inf), -1).masked_fill(mask, 0)}


def causal_samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]
        for shape in ((1, 1), (4, 512), (33, 33), (2, 5, 40), (1, 769), (2, 0, 5), (0, 3, 5), (3, 100, 700)):
            yield CSample(f"{kind} {shape}", {"y": filled(shape, dtype), "x": scores(*shape, dtype=dtype)})
        for layout, args in layouts(dtype, dtype):
            yield CSample(f"{kind} {layout}", args)
        x = scores(2, 30, 60, dtype=dtype)
        yield CSample(f"{kind} in place", {"y": x, "x": x})
        x = scores(60, 30, dtype=dtype).T
        yield CSample(f"{kind} transposed in place", {"y": x, "x": x})
        yield CSample(f"{kind} special", {"y": filled((7, 21), dtype), "x": special(dtype)})


def common_errors(op: str, y: str, **parameters: Any) -> Iterator[CErrorCase]:
    args = {"y": filled((4, 8), torch.float32), "x": scores(4, 8), **parameters}
    yield CErrorCase(
        "float64",
        {**args, "x": args["x"].double()},
        "BAD_TENSOR_DTYPE",
        op + "x must be float32, bfloat16 or float16, got float64",
    )
    yield CErrorCase(
        "shapes differ",
        {**args, "y": filled((4, 7), torch.float32)},
        "BAD_TENSOR_SHAPE",
        op + f"{y} must have the shape of x, [4, 8], got [4, 7]",
    )
    yield CErrorCase(
        "broadcast output",
        {**args, "y": torch.ones(4, 1).expand(4, 8)},
        "BAD_TENSOR_STRIDES",
        op + f"{y} must not be a broadcast view, for it is written to, got strides [1, 0]",
    )
    buffer = torch.ones(5, 8)
    yield CErrorCase(
        "overlap",
        {**args, "x": buffer[:4], "y": buffer[1:]},
        "BAD_PARAM",
        op + f"{y} must be x itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


def softmax_errors() -> Iterator[CErrorCase]:
    op = "infini::softmax: "
    args = {"y": filled((4, 8), torch.float32), "x": scores(4, 8), "axis": 1}
    yield from common_errors(op, "y", axis=1)
    for axis in (2, -3, 2**31 - 1, -(2**31)):
        yield CErrorCase(
            f"axis {axis}", {**args, "axis": axis}, "BAD_PARAM", op + f"axis must be in [-2, 1], got {axis}"
        )
    yield CErrorCase(
        "no dimensions",
        {"y": torch.ones(()), "x": torch.ones(()), "axis": 0},
        "BAD_TENSOR_SHAPE",
        op + "x must have 1 to 8 dimensions, got 0 (shape [])",
    )
    yield CErrorCase(
        "dtypes differ",
        {**args, "y": filled((4, 8), torch.float16)},
        "BAD_TENSOR_DTYPE",
        op + "y must have the dtype of x, float32, got float16",
    )


def log_softmax_errors() -> Iterator[CErrorCase]:
    op = "infini::log_softmax: "
    yield from common_errors(op, "y")
    yield CErrorCase(
        "integers",
        {"y": filled((4, 8), torch.int32), "x": scores(4, 8)},
        "BAD_TENSOR_DTYPE",
        op + "y must be float32, bfloat16 or float16, got int32",
    )
    x = scores(4, 8)
    yield CErrorCase(
        "in place with another dtype",
        {"y": x.view(torch.float16)[:, :8], "x": x},
        "BAD_PARAM",
        op + "y must be x itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


def causal_errors() -> Iterator[CErrorCase]:
    op = "infini::causal_softmax: "
    yield from common_errors(op, "out")
    yield CErrorCase(
        "one dimension",
        {"y": torch.ones(4), "x": torch.ones(4)},
        "BAD_TENSOR_SHAPE",
        op + "x must have 2 to 8 dimensions, got 1 (shape [4])",
    )
    yield CErrorCase(
        "more rows than columns",
        {"y": torch.ones(3, 2), "x": torch.ones(3, 2)},
        "BAD_TENSOR_SHAPE",
        op + "x must have at most as many rows q as columns k, got q = 3 and k = 2 (shape [3, 2])",
    )


C_OPS = [
    COp("Softmax", ["y"], softmax_reference, softmax_samples, softmax_errors),
    COp("LogSoftmax", ["y"], log_softmax_reference, log_softmax_samples, log_softmax_errors),
    COp("CausalSoftmax", ["y"], causal_reference, causal_samples, causal_errors),
]
