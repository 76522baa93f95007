"""scaled_mm_int8: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.scaled_mm_int8 import SPEC
from ..c_door import all_but, c_op
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    # In float64 every product of int8 values and their sum is exact.
    y = a.double() @ b.double() * a_scale.double().view(-1, 1) * b_scale.double().view(1, -1)
    return y if bias is None else y + bias.double()


def peer(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    y = torch._int_mm(a, b).float() * a_scale.view(-1, 1) * b_scale.view(1, -1)
    y = y if bias is None else y + bias
    return y.to(out_dtype or (torch.bfloat16 if bias is None else bias.dtype))


def inputs(
    dtype: torch.dtype, m: int, n: int, k: int, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:
    """Make all arguments, such that results have a spread of about 1; b is the transpose of a weight [n, k]."""
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=g)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
    size = 1 / (74 * max(k, 1) ** 0.25)  # 74: the spread of the int8 values
    a_scale, b_scale = ((0.5 + torch.rand(length, generator=g)) * size for length in (m, n))
    return a, weight.t(), a_scale, b_scale, torch.randn(n, generator=g).to(dtype) if bias else None, dtype


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for m, n, k in ((4, 6, 64), (1, 1, 1), (3, 5, 7), (5, 9, 65), (1, 130, 513), (33, 47, 130), (64, 256, 512)):
        yield Sample(f"{m}x{n}x{k}", inputs(dtype, m, n, k))
    yield Sample("without bias", inputs(dtype, 6, 10, 100, bias=False))
    for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
        yield Sample(f"empty {m}x{n}x{k}", inputs(dtype, m, n, k))
    for m, n, k in ((1, 7, 5), (5, 140, 200), (33, 150, 130)):
        a, b, *rest = inputs(dtype, m, n, k)
        yield Sample(f"b by rows {m}x{n}x{k}", (a, b.contiguous(), *rest))
    a, b, a_scale, b_scale, *rest = inputs(dtype, 6, 10, 100)
    yield Sample("scales with two dimensions", (a, b, a_scale[:, None], b_scale[None], *rest))
    a, b, *vectors, _ = inputs(dtype, 6, 10, 100)
    apart = (None if v is None else torch.stack([v, -v], -1)[:, 0] for v in vectors)
    yield Sample("strided scales and bias", (a, b, *apart, dtype))
    a, b, *rest = inputs(dtype, 5, 6, 131071, bias=False)
    a.fill_(-128)
    b.fill_(-128)
    b[:, 1] = 127
    yield Sample("largest sums", (a, b, *rest))
    a, b, a_scale, b_scale, bias, _ = inputs(dtype, 6, 10, 100)
    yield Sample("dtype of bias", (a, b, a_scale, b_scale, bias))


def errors() -> Iterator[ErrorCase]:
    a, b, a_scale, b_scale, bias, _ = inputs(torch.bfloat16, 4, 8, 16)
    assert bias is not None
    scales = a_scale, b_scale
    op = "infini::scaled_mm_int8: "
    batch = a.expand(2, 4, 16)  # the C operator accepts a batch of 1
    yield ErrorCase("rank", (batch, b, *scales), op + "a must have 2 dimensions, got 3 (shape [2, 4, 16])")
    yield ErrorCase("unsigned", (a.view(torch.uint8), b, *scales), op + "a must be int8, got uint8")
    yield ErrorCase("b unsigned", (a, b.view(torch.uint8), *scales), op + "b must be int8, got uint8")
    yield ErrorCase(
        "a by columns",
        (a.t().contiguous().t(), b, *scales),
        op + "a must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
    )
    yield ErrorCase(
        "depths differ",
        (a, b[:15], *scales),
        op + "b must have shape [16, 8] to match the columns of the left factor, got [15, 8]",
    )
    yield ErrorCase(
        "depth",
        (torch.zeros(4, 131072, dtype=torch.int8), b, *scales),
        op + "a must have at most 131071 columns, for int32 to hold the product, got 131072",
    )
    yield ErrorCase(
        "a_scale shape",
        (a, b, b_scale, b_scale),
        op + "a_scale must have shape [4] to match the rows of the product, got [8]",
    )
    yield ErrorCase(
        "b_scale shape",
        (a, b, a_scale, a_scale),
        op + "b_scale must have shape [8] to match the columns of the product, got [4]",
    )
    yield ErrorCase("scale dtype", (a, b, a_scale.bfloat16(), b_scale), op + "a_scale must be float32, got bfloat16")
    yield ErrorCase(
        "bias dtype",
        (a, b, *scales, bias, torch.float16),
        op + "bias must have the dtype of out, float16, got bfloat16",
    )
    yield ErrorCase(
        "bias shape",
        (a, b, *scales, bias[:7]),
        op + "bias must have shape [8] to match the columns of the product, got [7]",
    )
    yield ErrorCase(
        "out_dtype",
        (a, b, *scales, None, torch.float64),
        op + "out_dtype must be float32, bfloat16 or float16, got Double",
    )
    yield ErrorCase(
        "integer bias", (a, b, *scales, bias.int()), op + "bias must be float32, bfloat16 or float16, got int32"
    )
    yield ErrorCase(
        "out of another dtype",
        (a, b, *scales, None, torch.float16),
        op + "out must be float16, got bfloat16",
        {"out": torch.empty(4, 8).bfloat16()},
    )
    yield ErrorCase(
        "float64 out",
        (a, b, *scales),
        op + "out must be float32, bfloat16 or float16, got float64",
        {"out": torch.empty(4, 8).double()},
    )
    yield ErrorCase(
        "out shape",
        (a, b, *scales),
        op + "out must have shape [4, 8] to match the rows and columns of the factors, got [8, 4]",
        {"out": torch.empty(8, 4).bfloat16()},
    )


def cost(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    out = a.shape[0] * b.shape[1]
    dtype = out_dtype or (torch.bfloat16 if bias is None else bias.dtype)
    return Cost(bytes=nbytes(a, b, a_scale, b_scale, bias) + dtype.itemsize * out, flops=2 * out * a.shape[1])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for m, k, n in ((1, 4096, 4096), (8, 4096, 4096), (512, 2048, 2048)):
        yield Sample(f"{m}x{k}x{n}", inputs(dtype, m, n, k))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={torch.float32: (5e-7, 1e-6), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-11, 1e-6)},
)


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    def rows_apart(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (3, 17))[:, 3:-17]

    yield (
        "strided",
        args | {key: rows_apart(args[key]) for key in ("x", "out")} | {"weights": rows_apart(args["weights"].t()).t()},
    )
    batches = {key: args[key][None] for key in ("out", "x", "weights")}
    yield "batch of one", {**args, **batches, "x_scale": args["x_scale"][:, None]}


C_NAMES = {"a": "x", "b": "weights", "a_scale": "x_scale", "b_scale": "weights_scale"}
C_OPS = [
    c_op(
        INFO,
        "I8Gemm",
        ["out"],
        to_c=lambda args: {C_NAMES.get(name, name): value for name, value in args.items() if name != "out_dtype"},
        to_torch=lambda args: (
            {name: args[C_NAMES.get(name, name)] for name in INFO.arguments[:-1]} | {"out_dtype": None}
        ),
        words={**C_NAMES, "scaled_mm_int8": "int8_gemm"},
        refuses=all_but("out_dtype", "integer bias", "out of another dtype"),
        variants=c_layouts,
        varied=lambda dtype: [Sample("6x10x100", inputs(dtype, 6, 10, 100))],
    )
]
