"""softmax and log_softmax along any dimension: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import FLOATS, REGISTRY
from ..c_door import c_op, unwritten
from ..c_layouts import every_layout
from ..c_ops import CErrorCase, CSample, clone
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._along_a_dim import refused_dims, refused_inputs, refused_out_dtype, refused_outs, scores


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x.double(), dim)


def log_softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x.double(), dim)


def softmax_peer(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def log_softmax_peer(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x, dim)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (scores(dtype, 3, n),))
    yield Sample("one dimension", (scores(dtype, 64),))
    for dim in range(-3, 3):
        yield Sample(f"dimension {dim} of three", (scores(dtype, 5, 40, 37), dim))
    yield Sample("eight dimensions", (scores(dtype, 1, 2, 1, 3, 4, 1, 2, 5), 4))
    yield Sample("no rows", (scores(dtype, 0, 16),))
    yield Sample("no columns", (scores(dtype, 4, 0),))
    yield Sample("no rows, along them", (scores(dtype, 0, 16), 0))
    yield Sample("large", (scores(dtype, 150, 1024),))
    yield Sample("large, along the rows", (scores(dtype, 150, 1000), 0))
    large = scores(dtype, 3, 40)
    large[0] += 3e4  # would overflow without subtracting the maximum
    large[1] *= 1e3  # all but one exponential vanish
    large[2] -= 3e4  # all would vanish without subtracting the maximum
    yield Sample("large values", (large,))
    special = scores(dtype, 5, 20)
    special[0, ::2] = -torch.inf
    special[1] = -torch.inf
    special[2, 3] = torch.inf
    special[3, 3] = torch.nan
    yield Sample("infinities and NaN", (special,))
    yield Sample("strided columns", (scores(dtype, 4, 90)[:, ::2],))
    yield Sample("transposed", (scores(dtype, 50, 20).t(),))
    yield Sample("transposed, along the rows", (scores(dtype, 50, 20).t(), 0))
    yield Sample("a broadcast x", (scores(dtype, 1, 9).expand(4, 9),))
    yield Sample("along a broadcast dimension", (scores(dtype, 1, 9).expand(4, 9), 0))


def errors_of(name: str) -> Iterator[ErrorCase]:
    """Yield the calls that both ops reject."""
    x = scores(torch.float32, 3, 8)
    op = f"infini::{name}: "
    yield from refused_inputs(op, x)
    yield from refused_dims(op, x)
    yield from refused_outs(op, x)


def softmax_errors() -> Iterator[ErrorCase]:
    yield from errors_of("softmax")
    yield refused_out_dtype("infini::softmax: ", scores(torch.float32, 3, 8))


def log_softmax_errors() -> Iterator[ErrorCase]:
    yield from errors_of("log_softmax")
    yield ErrorCase(
        "out dtype",
        (scores(torch.float32, 3, 8),),
        "infini::log_softmax: out must be float32, bfloat16 or float16, got float64",
        {"out": torch.empty(3, 8, dtype=torch.float64)},
    )


def cost(x: Tensor, dim: int = -1) -> Cost:
    return Cost(bytes=2 * nbytes(x), flops=20 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x4096", (scores(dtype, 512, 4096),))
    yield Sample("32x512x512", (scores(dtype, 32, 512, 512),))
    yield Sample("1x32000", (scores(dtype, 1, 32000),))


INFOS = (
    OpInfo(
        **vars(REGISTRY["softmax"]),
        reference=softmax_reference,
        samples=samples,
        errors=softmax_errors,
        cost=cost,
        bench=bench,
        peer=softmax_peer,
    ),
    OpInfo(
        **vars(REGISTRY["log_softmax"]),
        reference=log_softmax_reference,
        samples=samples,
        errors=log_softmax_errors,
        cost=cost,
        bench=bench,
        peer=log_softmax_peer,
    ),
)


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    for dim in (0, -1):  # -1 is the dimension that log_softmax computes
        yield Sample(f"two dimensions, along {dim}", (scores(dtype, 20, 37), dim))
    yield Sample("four dimensions, along 1", (scores(dtype, 5, 4, 3, 6), 1))


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return every_layout(args, ["y"])


def c_dtypes() -> Iterator[CSample]:
    """Yield calls of log_softmax with an output of another dtype."""
    for of_x in FLOATS:
        for of_y in (dtype for dtype in FLOATS if dtype != of_x):
            small = (x for x, *dim in (s.args for s in samples(of_x)) if dim in ([], [-1]) and x.numel() < 8000)
            calls = [(str(list(x.shape)), {"y": unwritten(x.shape, of_y), "x": x}) for x in small]
            usual = {"y": unwritten((20, 37), of_y), "x": scores(of_x, 20, 37)}
            for name, args in (*calls, *every_layout(usual, ["y"])):
                yield CSample(f"{of_x} to {of_y}, {name}", clone(args))


def c_log_softmax_errors() -> Iterator[CErrorCase]:
    x = scores(torch.float32, 4, 8)
    op = "infini::log_softmax: y must be "
    yield CErrorCase(
        "integers",
        {"y": unwritten((4, 8), torch.int32), "x": x},
        "BAD_TENSOR_DTYPE",
        op + "float32, bfloat16 or float16, got int32",
    )
    yield CErrorCase(
        "in place with another dtype",
        {"y": x.view(torch.float16)[:, :8], "x": x},
        "BAD_PARAM",
        op + "x itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [
    c_op(
        INFOS[0],
        "Softmax",
        ["y"],
        {"dim": "axis"},
        words={"out": "y", "dim": "axis"},
        variants=c_layouts,
        varied=c_varied,
    ),
    c_op(
        INFOS[1],
        "LogSoftmax",
        ["y"],
        fixed={"dim": -1},
        samples=c_dtypes,
        errors=c_log_softmax_errors,
        words={"out": "y", "dim": "axis"},
        variants=c_layouts,
        varied=c_varied,
    ),
]
