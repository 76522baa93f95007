"""causal_softmax: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.causal_softmax import SPEC
from ..c_door import c_op
from ..c_layouts import every_layout
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._along_a_dim import refused_out_dtype, refused_outs, scores


def hidden(x: Tensor) -> Tensor:
    """Return [q, k]: True where a column is later than the row's token."""
    q, k = x.shape[-2:]
    return torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)


def reference(x: Tensor) -> Tensor:
    mask = hidden(x)
    return torch.softmax(x.double().masked_fill(mask, -torch.inf), -1).masked_fill(mask, 0)


def peer(x: Tensor) -> Tensor:
    """Compute it as eager attention does: mask, softmax in float32, back to the dtype."""
    return torch.softmax(x.masked_fill(hidden(x), -torch.inf), -1, dtype=torch.float32).to(x.dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("prefill", (scores(dtype, 2, 4, 33, 33),))
    yield Sample("chunk", (scores(dtype, 2, 3, 5, 40),))
    yield Sample("decode", (scores(dtype, 2, 4, 1, 769),))
    yield Sample("two dimensions", (scores(dtype, 7, 9),))
    for k in (1, 7, 769, 5125):
        yield Sample(f"{k} columns", (scores(dtype, min(k, 3), k),))
    yield Sample("six dimensions", (scores(dtype, 2, 1, 2, 3, 4, 5),))
    yield Sample("large", (scores(dtype, 3, 130, 300),))
    yield Sample("no rows", (scores(dtype, 2, 0, 5),))
    yield Sample("no columns", (scores(dtype, 2, 0, 0),))
    yield Sample("no heads", (scores(dtype, 0, 3, 5),))
    large = scores(dtype, 3, 20, 40)
    large[0] += 1e4  # would overflow without subtracting the maximum
    large[1] *= 1e3  # all but one exponential vanish
    large[2] -= 1e4  # all would vanish without subtracting the maximum
    yield Sample("large scores", (large,))
    special = scores(dtype, 6, 20)
    special[0, ::2] = -torch.inf
    special[1] = -torch.inf
    special[2, 3] = torch.inf
    special[3, 3] = torch.nan
    special[4, 19] = torch.nan  # hidden
    yield Sample("infinities and NaN", (special,))
    yield Sample("strided columns", (scores(dtype, 4, 90)[:, ::2],))
    yield Sample("transposed", (scores(dtype, 50, 20).t(),))
    yield Sample("a broadcast x", (scores(dtype, 1, 1, 9).expand(3, 4, 9),))


def errors() -> Iterator[ErrorCase]:
    x = scores(torch.float32, 3, 8)
    op = "infini::causal_softmax: "
    yield ErrorCase("one dimension", (x[0],), op + "x must have 2 to 8 dimensions, got 1 (shape [8])")
    yield ErrorCase("float64", (x.double(),), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase(
        "more queries than tokens",
        (x[:, :2],),
        op + "x must have at most as many rows q as columns k, got q = 3 and k = 2 (shape [3, 2])",
    )
    yield from refused_outs(op, x)
    yield refused_out_dtype(op, x)


def cost(x: Tensor) -> Cost:
    q, k = x.shape[-2:]
    seen = x.numel() // max(q * k, 1) * (q * (k - q) + q * (q + 1) // 2)
    return Cost(bytes=seen * x.element_size() + nbytes(x), flops=20 * seen)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("32x512x512", (scores(dtype, 32, 512, 512),))
    yield Sample("512x4096", (scores(dtype, 512, 4096),))
    yield Sample("32x1x2048", (scores(dtype, 32, 1, 2048),))
    yield Sample("1x4096", (scores(dtype, 1, 4096),))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
)


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("", (scores(dtype, 4, 20, 37),))


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return every_layout(args, ["y"])


C_OPS = [c_op(INFO, "CausalSoftmax", ["y"], variants=c_layouts, varied=c_varied)]
