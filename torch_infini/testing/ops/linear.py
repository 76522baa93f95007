"""linear: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import FLOATS
from ...ops.linear import SPEC
from ..c_door import backwards, c_op, unwritten
from ..c_ops import CSample
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import accumulation_error


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


def peer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def inputs(
    dtype: torch.dtype, *rows: int, k: int, n: int, bias: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make (x, weight, bias) such that results have a spread of 1 and all products are of similar size.

    |x| is in [0.5, 1.5] and |weight| in [0.5, 1.5] / sqrt(k), so that a missing product is noticed.
    """
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return (0.5 + torch.rand(shape, generator=g)) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)

    x, weight = values(*rows, k), values(n, k) / max(k, 1) ** 0.5
    return x.to(dtype), weight.to(dtype), values(n).to(dtype) if bias else None


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 7, 31, 64, 769, 5125):
        yield Sample(f"{k} columns", inputs(dtype, 1, k=k, n=19))
    yield Sample("bias", inputs(dtype, 3, k=100, n=50, bias=True))
    for rows in range(2, 10):
        yield Sample(f"{rows} rows", inputs(dtype, rows, k=333, n=61, bias=True))
    yield Sample("33 rows", inputs(dtype, 33, k=130, n=53))
    yield Sample("several blocks of columns", inputs(dtype, 20, k=2500, n=100))
    yield Sample("one dimension", inputs(dtype, k=65, n=33, bias=True))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, k=96, n=70))
    yield Sample("one output column", inputs(dtype, 2, k=40, n=1, bias=True))
    yield Sample("no rows", inputs(dtype, 0, k=16, n=8))
    yield Sample("no outputs", inputs(dtype, 4, k=16, n=0))
    yield Sample("no columns", inputs(dtype, 4, k=0, n=20))
    yield Sample("no columns, bias", inputs(dtype, 4, k=0, n=20, bias=True))
    yield Sample("several threads", inputs(dtype, 2, k=1024, n=1100, bias=True))
    yield Sample("many rows", inputs(dtype, 3, 50, k=256, n=200, bias=True))
    for rows in (3, 40) if dtype.itemsize == 2 else ():
        x, weight, _ = inputs(dtype, rows, k=100, n=50)
        yield Sample(f"float32 bias, {rows} rows", (x, weight, torch.linspace(-2, 2, 50)))


def errors() -> Iterator[ErrorCase]:
    x, weight, bias = inputs(torch.float32, 2, k=16, n=8, bias=True)
    assert bias is not None
    op = "infini::linear: "
    yield ErrorCase("scalar", (x[0, 0], weight), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), weight), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("weight rank", (x, bias), op + "weight must have 2 dimensions, got 1 (shape [8])")
    yield ErrorCase("weight dtype", (x, weight.half()), op + "weight must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "weight not transposed",
        (x, weight.t()),
        op + "weight must have shape [16, 16] to match the last dimension of x, got [16, 8]",
    )
    yield ErrorCase(
        "weight's columns apart",
        (x[:, :8].contiguous(), weight[:, ::2]),
        op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase(
        "x's columns apart",
        (x[:, ::2], weight[:, :8]),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase(
        "bias too long",
        (x, weight, torch.ones(9)),
        op + "bias must have shape [8] to match the rows of weight, got [9]",
    )
    yield ErrorCase(
        "bias dtype", (x, weight, bias.bfloat16()), op + "bias must have the dtype of x, float32, got bfloat16"
    )
    yield ErrorCase(
        "bias strides",
        (x, weight, torch.ones(16)[::2]),
        op + "bias must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
    )
    yield ErrorCase("meta weight", (x, weight.to("meta")), op + "weight must be on the device of x, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (x, weight),
        op + "out must have shape [2, 8], the rows of x by the rows of weight, got [8, 2]",
        {"out": torch.empty(8, 2)},
    )
    yield ErrorCase(
        "out dtype",
        (x, weight),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 8, dtype=torch.half)},
    )
    yield ErrorCase(
        "out strides",
        (x, weight),
        op + "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 2]",
        {"out": torch.empty(8, 2).t()},
    )
    yield ErrorCase(
        "out is a broadcast view",
        (x, weight),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8).expand(2, 8)},
    )
    square = inputs(torch.float32, 8, k=8, n=8)
    for name, tensor in (("x", square[0]), ("weight", square[1])):
        yield ErrorCase(
            f"out is {name}",
            square,
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": tensor},
        )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], weight, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 8)},
    )


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    out = x.numel() // x.shape[-1] * weight.shape[0] if x.numel() else x.shape[:-1].numel() * weight.shape[0]
    return Cost(bytes=nbytes(x, weight, bias) + out * x.element_size(), flops=2 * x.numel() * weight.shape[0])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    shapes = [(1, 2048, 5632), (1, 5632, 2048), (1, 2048, 32000)]
    shapes += [(rows, 2048, 5632) for rows in (4, 8, 16, 32)] + [(512, 2048, 2048)]
    for rows, k, n in shapes:
        yield Sample(f"{rows}x{k}->{n}", inputs(dtype, rows, k=k, n=n))


def cuda_slack(expected: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    size = reference(x.double().square(), weight.double().square()).sqrt()
    return accumulation_error(size, x.dtype, x.shape[-1])


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


def c_samples() -> Iterator[CSample]:
    """Yield reversed rows of every tensor, and spaced rows; for both kernels: few rows and many."""
    for dtype in FLOATS:
        for rows in (3, 50):
            x, weight, bias = inputs(dtype, rows, k=130, n=70, bias=True)
            out, label = unwritten((rows, 70), dtype), f"{str(dtype).removeprefix('torch.')} {rows} rows"
            turned = {"out": backwards(out), "x": backwards(x), "weight": backwards(weight), "bias": bias}
            yield CSample(f"{label} backwards", turned)
            wide = {name: torch.cat((t, t), -1)[:, : t.shape[1]] for name, t in (("x", x), ("weight", weight))}
            yield CSample(f"{label} apart", {"out": unwritten((rows, 75), dtype)[:, 3:73], **wide, "bias": bias})
            one = {"x": x[:1].expand(rows, 130), "weight": weight[:1].expand(70, 130), "bias": None}
            yield CSample(f"{label}, one row for all", {"out": out.clone(), **one})


C_OPS = [c_op(INFO, "Linear", ["out"], samples=c_samples)]
