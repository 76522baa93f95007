"""linear_block_panels: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops._block_panels import NUMBERS, PANEL, blocks_of, packed_shape, put_blocks
from ...ops._blocks import KINDS
from ...ops.linear_block_panels import SPEC
from ..op_info import TOLERANCES, Cost, ErrorCase, OpInfo, Sample, nbytes
from . import linear_blocks
from .pack_blocks import KNOWN


def in_panels(weight: Tensor, kind: int) -> Tensor:
    """Return a weight in blocks, of a multiple of 16 rows, in panels."""
    k = weight.shape[1] * KINDS[NUMBERS[kind]].elements
    packed = torch.zeros(packed_shape(kind, len(weight), k), dtype=torch.uint8)
    put_blocks(packed, weight, kind)
    return packed


def reference(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    return linear_blocks.reference(x, blocks_of(weight, kind), kind, bias)


def peer(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    """Decode the weight in every call."""
    return linear_blocks.peer(x, blocks_of(weight, kind), kind, bias)


def inputs(
    dtype: torch.dtype, *rows: int, kind: str, blocks: int, panels: int, bias: bool = False
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Make (x, weight, kind, bias)."""
    x, weight, number, b = linear_blocks.inputs(dtype, *rows, kind=kind, blocks=blocks, n=PANEL * panels, bias=bias)
    return x, in_panels(weight, number), number, b


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in NUMBERS.values():
        for rows in (1, 2, 3):
            yield Sample(f"{kind}, {rows} rows", inputs(dtype, rows, kind=kind, blocks=5, panels=2, bias=rows == 2))
    for rows in (*range(4, 10), 15, 16, 17, 63, 64, 65):
        yield Sample(f"{rows} rows", inputs(dtype, rows, kind="q6_k", blocks=1, panels=2, bias=True))
    for blocks in (1, 15, 16, 17, 40):  # 16 of these blocks are decoded at a time
        yield Sample(f"{blocks} blocks", inputs(dtype, 7, kind="q5_0", blocks=blocks, panels=1))
    yield Sample("one dimension", inputs(dtype, kind="iq4_nl", blocks=2, panels=3, bias=True))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, kind="int4_64", blocks=2, panels=4))
    yield Sample("no rows", inputs(dtype, 0, kind="q4_k", blocks=1, panels=1))
    yield Sample("no outputs", inputs(dtype, 4, kind="q4_k", blocks=1, panels=0))
    yield Sample("no columns", inputs(dtype, 4, kind="q8_0", blocks=0, panels=2))
    yield Sample("no columns, bias", inputs(dtype, 4, kind="q8_0", blocks=0, panels=2, bias=True))
    for rows in (1, 5):
        x, weight, number, _ = inputs(dtype, rows, kind="q8_0", blocks=4, panels=2)
        wide = torch.randn(rows, 200, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(dtype)
        yield Sample(f"{rows} rows, a part of the columns", (wide[:, 3:131], weight, number))
        apart = torch.empty(weight.numel() + 1, dtype=torch.uint8)[1:].view(weight.shape).copy_(weight)
        yield Sample(f"{rows} rows, an odd address", (x, apart, number))
        for name, value in (("infinity", torch.inf), ("NaN", torch.nan)):
            broken = x.clone()
            broken[0, 129 % x.shape[1]] = value
            yield Sample(f"{rows} rows, {name} in x", (broken, weight, number))
        yield Sample(f"{rows} rows, several threads", inputs(dtype, rows, kind="q4_0", blocks=32, panels=69, bias=True))
    yield Sample("more rows than one pass has", inputs(dtype, 270, kind="q4_1", blocks=3, panels=3, bias=True))
    small = inputs(dtype, 2, kind="mxfp4", blocks=1, panels=1)
    linear = in_panels(torch.zeros(PANEL, 1, 17, dtype=torch.uint8) + 0x21, 39)
    linear.view(-1)[:PANEL] = torch.arange(PANEL)  # the smallest exponents, whose powers are denormal
    yield Sample("powers of two that are denormal", (small[0] * 1000, linear, 39))


def errors() -> Iterator[ErrorCase]:
    op = "infini::linear_block_panels: "
    x, weight, kind, bias = inputs(torch.float32, 2, kind="q8_0", blocks=3, panels=1, bias=True)
    assert bias is not None
    yield ErrorCase("unknown kind", (x, weight, 1001), op + f"kind must be one of {KNOWN}, got 1001")
    yield ErrorCase("scalar", (x[0, 0], weight, kind), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), weight, kind), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("weight rank", (x, weight[0], kind), op + "weight must have 3 dimensions, got 2 (shape [3, 544])")
    yield ErrorCase("weight dtype", (x, weight.view(torch.int8), kind), op + "weight must be uint8, got int8")
    yield ErrorCase(
        "columns that are no whole blocks",
        (x[:, :80], weight, kind),
        op + "x must have a last dimension that is a multiple of 32, the elements of a block of q8_0, got [2, 80]",
    )
    yield ErrorCase(
        "weight of another kind",
        (x, weight, 2),
        op + "weight must have shape [1, 3, 288] of panels of 16 rows of the kind's blocks, got [1, 3, 544]",
    )
    yield ErrorCase(
        "weight is a part",
        (x[:, :64], weight[:, :2].expand(2, -1, -1), kind),
        op + "weight must be contiguous, got strides [0, 544, 1]",
    )
    yield ErrorCase(
        "x's columns apart",
        (torch.cat((x, x), 1)[:, ::2], weight, kind),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [192, 2]",
    )
    yield ErrorCase(
        "bias too long",
        (x, weight, kind, torch.ones(17)),
        op + "bias must have shape [16] to match the rows of weight, got [17]",
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
        op + "out must have shape [2, 16], the rows of x by the rows of weight, got [16, 2]",
        out(16, 2),
    )
    for name, memory in {"x": x.view(-1)[:32], "weight": weight.view(-1)[:128].view(torch.float32)}.items():
        yield ErrorCase(
            f"out overlaps {name}",
            (x, weight, kind),
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": memory.view(2, 16)},
        )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], weight, kind, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 16)},
    )


def cost(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Cost:
    rows, n = x.shape[:-1].numel(), PANEL * weight.shape[0]
    return Cost(bytes=nbytes(x, weight, bias) + rows * n * x.element_size(), flops=2 * rows * n * x.shape[-1])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in NUMBERS.values():
        for rows, k, n in ((1, 2048, 5632), (128, 2048, 2048)):
            # A panel again and again: making them is slow, and times do not depend on the values.
            x, weight, number, _ = inputs(dtype, rows, kind=kind, blocks=k // KINDS[kind].elements, panels=1)
            yield Sample(f"{kind} {rows}x{k}->{n}", (x, weight.repeat(n // PANEL, 1, 1), number))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={**TOLERANCES, torch.bfloat16: linear_blocks.INFO.tolerances[torch.bfloat16]},  # for they may serve
)
