"""linear_blocks: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops._blocks import KINDS, BlockKind
from ...ops.linear_blocks import SPEC
from ..op_info import TOLERANCES, Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import accumulation_error, rounding_error
from .linear import inputs as of_linear

BY_NUMBER = {kind.number: kind for kind in KINDS.values()}


@lru_cache(256)
def random_weight(kind: BlockKind, n: int, k: int) -> Tensor:
    """Return a weight of random codes and scales whose values have a mean square of about 1 / k, not to be written."""
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randint(256, (n, k // kind.elements, kind.bytes), dtype=torch.uint8, generator=generator)

    def scale_by(factor: float) -> None:
        for at in kind.scales:
            scales = torch.rand(n, k // kind.elements, generator=generator) * factor + factor / 8
            weight[..., at : at + kind.scale_dtype.itemsize] = scales.to(kind.scale_dtype)[..., None].view(torch.uint8)

    if kind.name == "mxfp4":  # exponents
        weight[..., 0] = (weight[..., 0] & 3) + 124 - max(k, 1).bit_length() // 2
    if kind.name == "nvfp4":  # scales from 0.25 to 15
        weight[..., 4:12] = 0x28 + weight[..., 4:12] % 0x30
    if kind.name == "fp8":
        codes = weight[..., 4:]
        codes[codes & 127 == 127] = 0  # NaN
    scale_by(1.0)
    if weight.numel():
        scale_by(float(kind.dequantize(weight).square().mean() * k) ** -0.5)
    return weight


def dense(weight: Tensor, kind: int) -> Tensor:
    """Return the values of a weight in float32, which the kernels compute with."""
    return BY_NUMBER[kind].dequantize(weight)


def reference(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    y: Tensor = x.double() @ dense(weight, kind).double().T
    return y if bias is None else y + bias.double()


def peer(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    """Decode the weight in every call."""
    return torch.nn.functional.linear(x, BY_NUMBER[kind].dequantize(weight, x.dtype), bias)


def inputs(
    dtype: torch.dtype, *rows: int, kind: str, blocks: int, n: int, bias: bool = False
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Make (x, weight, kind, bias)."""
    of = KINDS[kind]
    k = blocks * of.elements
    x, _, b = of_linear(dtype, *rows, k=k, n=n, bias=bias)
    return x, random_weight(of, n, k).clone(), of.number, b


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in KINDS:
        for rows in (1, 2, 3):
            yield Sample(f"{kind}, {rows} rows", inputs(dtype, rows, kind=kind, blocks=5, n=27, bias=rows == 2))
    for n in (1, 11, 12, 13, 500):
        yield Sample(f"{n} rows of the weight", inputs(dtype, 1, kind="q8_0", blocks=3, n=n, bias=True))
    for rows in (*range(4, 10), 15, 16, 17, 63, 64, 65):
        yield Sample(f"{rows} rows", inputs(dtype, rows, kind="q6_k", blocks=1, n=29, bias=True))
    for blocks in (1, 15, 16, 17, 40):  # 16 of these blocks are decoded at a time
        yield Sample(f"{blocks} blocks", inputs(dtype, 7, kind="q5_0", blocks=blocks, n=13))
    yield Sample("one dimension", inputs(dtype, kind="iq4_nl", blocks=2, n=33, bias=True))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, kind="nf4", blocks=2, n=70))
    yield Sample("no rows", inputs(dtype, 0, kind="q4_k", blocks=1, n=8))
    yield Sample("no outputs", inputs(dtype, 4, kind="q4_k", blocks=1, n=0))
    yield Sample("no columns", inputs(dtype, 4, kind="q8_0", blocks=0, n=20))
    yield Sample("no columns, bias", inputs(dtype, 4, kind="q8_0", blocks=0, n=20, bias=True))
    for rows in (1, 5):
        x, weight, number, _ = inputs(dtype, rows, kind="q5_k", blocks=4, n=20)
        yield Sample(f"{rows} rows, a part of the columns", (x[:, 256:768], weight[:, 1:3], number, None))
        yield Sample(f"{rows} rows, every other row of the weight", (x, weight[::2], number, None))
        apart = torch.empty(weight.numel() + 1, dtype=torch.uint8)[1:].view(weight.shape).copy_(weight)
        yield Sample(f"{rows} rows, an odd address", (x, apart, number, None))
        for name, value in (("infinity", torch.inf), ("NaN", torch.nan)):
            broken = x.clone()
            broken[0, 129] = value
            yield Sample(f"{rows} rows, {name} in x", (broken, weight, number, None))
        yield Sample(f"{rows} rows, several threads", inputs(dtype, rows, kind="q4_0", blocks=32, n=1100, bias=True))
    yield Sample("more rows than one pass has", inputs(dtype, 270, kind="q4_1", blocks=3, n=50, bias=True))


def errors() -> Iterator[ErrorCase]:
    op = "infini::linear_blocks: "
    x, weight, kind, bias = inputs(torch.float32, 2, kind="q8_0", blocks=3, n=8, bias=True)
    assert bias is not None
    known = ", ".join(f"{one.number} ({one.name})" for one in KINDS.values())
    yield ErrorCase("unknown kind", (x, weight, 5), op + f"kind must be one of {known}, got 5")
    yield ErrorCase("scalar", (x[0, 0], weight, kind), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), weight, kind), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("weight rank", (x, weight[0], kind), op + "weight must have 3 dimensions, got 2 (shape [3, 34])")
    yield ErrorCase("weight dtype", (x, weight.view(torch.int8), kind), op + "weight must be uint8, got int8")
    yield ErrorCase(
        "columns that are no whole blocks",
        (x[:, :80], weight, kind),
        op + "x must have a last dimension that is a multiple of 32, the elements of a block of q8_0, got [2, 80]",
    )
    yield ErrorCase(
        "weight of another kind",
        (x, weight, 2),
        op + "weight must have shape [8, 3, 18] to match the last dimension of x and the kind of block, got [8, 3, 34]",
    )
    yield ErrorCase(
        "blocks apart",
        (x[:, :64], weight[:, ::2], kind),
        op + "weight must have the blocks of a row adjacent (call .contiguous() on it), got strides [102, 68, 1]",
    )
    yield ErrorCase(
        "x's columns apart",
        (torch.cat((x, x), 1)[:, ::2], weight, kind),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [192, 2]",
    )
    yield ErrorCase(
        "bias too long",
        (x, weight, kind, torch.ones(9)),
        op + "bias must have shape [8] to match the rows of weight, got [9]",
    )
    yield ErrorCase(
        "bias dtype", (x, weight, kind, bias.half()), op + "bias must have the dtype of x, float32, got float16"
    )
    yield ErrorCase(
        "meta weight", (x, weight.to("meta"), kind), op + "weight must be on the device of x, cpu, got meta"
    )

    def out(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {"out": torch.empty(shape, dtype=dtype)}

    yield ErrorCase(
        "out shape",
        (x, weight, kind),
        op + "out must have shape [2, 8], the rows of x by the rows of weight, got [8, 2]",
        out(8, 2),
    )
    yield ErrorCase(
        "out dtype",
        (x, weight, kind),
        op + "out must have the dtype of x, float32, got float16",
        out(2, 8, dtype=torch.half),
    )
    for name, memory in {"x": x.view(-1)[:16], "weight": weight.view(-1)[:64].view(torch.float32)}.items():
        yield ErrorCase(
            f"out overlaps {name}",
            (x, weight, kind),
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": memory.view(2, 8)},
        )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], weight, kind, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 8)},
    )


def cost(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Cost:
    rows, n = x.shape[:-1].numel(), weight.shape[0]
    return Cost(bytes=nbytes(x, weight, bias) + rows * n * x.element_size(), flops=2 * rows * n * x.shape[-1])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in KINDS:
        for rows, k, n in ((1, 2048, 5632), (128, 2048, 2048)):
            # A few rows again and again: making them is slow, and times do not depend on the values.
            x, weight, number, _ = inputs(dtype, rows, kind=kind, blocks=k // KINDS[kind].elements, n=16)
            yield Sample(f"{kind} {rows}x{k}->{n}", (x, weight.repeat(n // 16, 1, 1), number))


def cuda_slack(expected: Tensor, x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    """Return the error of other orders of sums, and of elements that are rounded for more than eight rows."""
    size = (x.double().square() @ dense(weight, kind).double().square().T).sqrt()
    rounded = x.dtype != torch.float32 and x.shape[:-1].numel() > 8
    return accumulation_error(size, x.dtype, x.shape[-1]) + (rounding_error(size, x.dtype) if rounded else 0)


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    # Where bfloat16 is multiplied in pairs or tiles, elements are rounded to it: results with a mean square of 1 get
    # errors with a standard deviation of at most 2^-8 / sqrt(3); the largest of some thousands is below seven times
    # that.
    tolerances={**TOLERANCES, torch.bfloat16: (2**-8, 2**-6)},
    same_bits_on_cuda=False,
    cuda_slack=cuda_slack,
)
