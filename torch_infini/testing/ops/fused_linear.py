"""fused_linear: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.fused_linear import SPEC, fake
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import INFO as LINEAR
from .linear import cuda_slack as linear_slack
from .linear import inputs as linear_inputs
from .linear import peer as linear_peer
from .linear import reference as linear_reference


def parts(
    a: Tensor, b: Tensor, c: Tensor | None, bias_a: Tensor | None, bias_b: Tensor | None, bias_c: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the given weights, each with its bias."""
    two = [(a, bias_a), (b, bias_b)]
    return two if c is None else [*two, (c, bias_c)]


def reference(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
    bias_c: Tensor | None = None,
) -> Tensor:
    return torch.cat([linear_reference(x, *part) for part in parts(a, b, c, bias_a, bias_b, bias_c)], -1)


def peer(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
    bias_c: Tensor | None = None,
) -> Tensor:
    return torch.cat([linear_peer(x, *part) for part in parts(a, b, c, bias_a, bias_b, bias_c)], -1)


def inputs(dtype: torch.dtype, *rows: int, k: int, n: tuple[int, ...], biases: str = "") -> tuple[Tensor | None, ...]:
    """Make arguments for results with a spread of 1; n: each weight's rows; biases: which weights have one."""
    drawn = [linear_inputs(dtype, *rows, k=k, n=width, bias=True, seed=i) for i, width in enumerate(n)]
    weights = [weight for _, weight, _ in drawn] + [None] * (3 - len(n))
    named = zip("abc", drawn, strict=False)
    given = {name: bias for name, (_, _, bias) in named if name in biases}
    return drawn[0][0], *weights, *(given.get(name) for name in "abc")


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 31, 769, 5125):
        yield Sample(f"{k} columns", inputs(dtype, 1, k=k, n=(19, 7, 8)))
    for biases in ("a", "b", "c", "ab", "ac", "bc", "abc"):
        yield Sample(f"biases of {biases}", inputs(dtype, 3, k=100, n=(50, 13, 14), biases=biases))
    for biases in ("", "a", "b", "ab"):
        yield Sample(f"two weights, biases of {biases}", inputs(dtype, 3, k=64, n=(50, 90), biases=biases))
    for rows in (2, 4, 5, 9, 33):
        yield Sample(f"{rows} rows", inputs(dtype, rows, k=333, n=(61, 12, 30), biases="b"))
    yield Sample("one dimension", inputs(dtype, k=65, n=(33, 5), biases="ab"))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, k=96, n=(70, 10, 11)))
    yield Sample("one output column each", inputs(dtype, 2, k=40, n=(1, 1, 1), biases="abc"))
    yield Sample("no rows", inputs(dtype, 0, k=16, n=(8, 4)))
    yield Sample("no outputs", inputs(dtype, 4, k=16, n=(0, 0, 0)))
    for n in ((0, 20, 30), (20, 0, 30), (20, 30, 0)):
        yield Sample(f"{n} outputs", inputs(dtype, 4, k=16, n=n, biases="abc"))
    yield Sample("no columns", inputs(dtype, 4, k=0, n=(20, 3)))
    yield Sample("no columns, biases", inputs(dtype, 4, k=0, n=(20, 3, 4), biases="abc"))
    yield Sample("several threads", inputs(dtype, 2, k=1024, n=(1100, 100, 101), biases="abc"))
    yield Sample("many rows", inputs(dtype, 3, 50, k=256, n=(200, 60, 50), biases="ab"))


def errors() -> Iterator[ErrorCase]:
    x, a, b, c, bias_a, bias_b, bias_c = inputs(torch.float32, 2, k=16, n=(8, 4, 6), biases="abc")
    assert x is not None and a is not None and b is not None and c is not None
    assert bias_a is not None and bias_b is not None and bias_c is not None
    op = "infini::fused_linear: "
    yield ErrorCase("scalar", (x[0, 0], a, b), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), a, b), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("a's rank", (x, bias_a, b), op + "a must have 2 dimensions, got 1 (shape [8])")
    yield ErrorCase("b's dtype", (x, a, b.half()), op + "b must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "c not transposed",
        (x, a, b, c.t()),
        op + "c must have shape [16, 16] to match the last dimension of x, got [16, 6]",
    )
    yield ErrorCase(
        "b's columns apart",
        (x[:, :8].contiguous(), a[:, :8], b[:, ::2]),
        op + "b must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    for i, name in enumerate("abc"):
        biases: list[Tensor | None] = [None, None, None]
        biases[i] = torch.ones(9)
        rows = (8, 4, 6)[i]
        yield ErrorCase(
            f"bias_{name} too long",
            (x, a, b, c, *biases),
            op + f"bias_{name} must have shape [{rows}] to match the rows of {name}, got [9]",
        )
    yield ErrorCase(
        "bias_c's dtype",
        (x, a, b, c, None, None, bias_c.bfloat16()),
        op + "bias_c must have the dtype of x, float32, got bfloat16",
    )
    yield ErrorCase(
        "bias_b's strides",
        (x, a, b, None, None, torch.ones(8)[::2]),
        op + "bias_b must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
    )
    yield ErrorCase(
        "bias_c without c",
        (x, a, b, None, None, None, bias_c),
        op + "bias_c must be None where c is, got a tensor",
    )
    yield ErrorCase("meta c", (x, a, b, c.to("meta")), op + "c must be on the device of x, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (x, a, b, c),
        op + "out must have shape [2, 18], the rows of x by those of all weights, got [2, 12]",
        {"out": torch.empty(2, 12)},
    )
    yield ErrorCase(
        "out dtype",
        (x, a, b),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 12, dtype=torch.half)},
    )
    yield ErrorCase(
        "out strides",
        (x, a, b),
        op + "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 2]",
        {"out": torch.empty(12, 2).t()},
    )
    yield ErrorCase(
        "out is a broadcast view",
        (x, a, b),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(12).expand(2, 12)},
    )
    memory = torch.randn(64)
    inside: dict[str, tuple[Any, ...]] = {
        "x": (memory[:16], a, b, c),
        "a": (x[0], memory[:16].view(1, 16), b, c),
        "b": (x[0], a, memory[:16].view(1, 16), c),
        "c": (x[0], a, b, memory[:16].view(1, 16)),
        "bias_a": (x[0], a, b, c, memory[:8], None, None),
        "bias_b": (x[0], a, b, c, None, memory[:4], None),
        "bias_c": (x[0], a, b, c, None, None, memory[:6]),
    }
    for name, args in inside.items():
        yield ErrorCase(
            f"out overlaps {name}",
            args,
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": memory[: fake(*args).shape[0]]},
        )


def cost(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias_a: Tensor | None = None,
    bias_b: Tensor | None = None,
    bias_c: Tensor | None = None,
) -> Cost:
    n = a.shape[0] + b.shape[0] + (c.shape[0] if c is not None else 0)
    out = x.shape[:-1].numel() * n
    return Cost(bytes=nbytes(x, a, b, c, bias_a, bias_b, bias_c) + out * x.element_size(), flops=2 * x.numel() * n)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows in (1, 8, 512):
        yield Sample(f"{rows}x2048->2048+256+256", inputs(dtype, rows, k=2048, n=(2048, 256, 256)))
        yield Sample(f"{rows}x2048->5632+5632", inputs(dtype, rows, k=2048, n=(5632, 5632)))


def cuda_slack(expected: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, *biases: Any) -> Tensor:
    return linear_slack(expected, x, torch.cat([weight for weight in (a, b, c) if weight is not None]))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=LINEAR.tolerances,
    same_bits_on_cuda=False,
    cuda_slack=cuda_slack,
)
