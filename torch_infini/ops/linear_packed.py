"""linear_packed: the product with a weight that pack_linear has laid out for the CPU's multiply units, in bfloat16.

The kernels are in csrc/infiniop/linear_packed. Models keep their dense weights so where that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._packed import PANEL, packed_shape, unpack_linear
from ._registry import Cost, ErrorCase, OpSpec, Sample, nbytes
from .linear import SPEC as LINEAR
from .linear import inputs as plain_inputs


def linear_packed(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a packed weight, transposed, and add the bias.

    y = x @ w^T + bias, w being the weight [n, k] that was packed, summed in float32 in the order of its columns and
    rounded once: a row gives the same bits whatever the thread count and whatever other rows are in the call.

    Args:
        x: [..., k] bfloat16 on the CPU; stride 1 in the last dimension, any other strides.
        weight: [at least n / 48, k / 2 rounded up, 48, 2] bfloat16, contiguous; packed by pack_linear.
        n: Rows of w, columns of y.
        bias: [n] bfloat16, or None.
        out: [..., n], written and returned instead of a new tensor; shares no memory with the arguments.

    Returns:
        [..., n] bfloat16, contiguous.

    Raises:
        RuntimeError: For a rank, shape, dtype or stride that cannot be served.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> w = weight.transpose(1, 2).flatten(2).flatten(0, 1)[:n, : x.shape[-1]]
        >>> y = torch.nn.functional.linear(x, w, bias)

    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008: the panels,
        which here are made once and not in each call.
    """
    if out is None:
        return torch.ops.infini.linear_packed.default(x, weight, n, bias)
    return torch.ops.infini.linear_packed.out(x, weight, n, bias, out=out)


def pack_linear(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    """Write rows of a weight into a packed one, in place.

    packed[row // 48, i, row % 48] = weight[j, 2i : 2i + 2] with row = first_row + j; of an odd number of columns the
    last word has a 0. Other rows stay as they are: calls with different rows may run at the same time.

    Args:
        packed: [panels, k / 2 rounded up, 48, 2] bfloat16 on the CPU, contiguous, written.
        weight: [rows, k] bfloat16; stride 1 in the last dimension, rows at any distance.
        first_row: Which row of the packed weight the first one becomes.

    Returns:
        None.

    Raises:
        RuntimeError: For a rank, shape, dtype or stride that cannot be served, or rows for which there is no room.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> rows = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        >>> row = torch.arange(first_row, first_row + weight.shape[0])
        >>> packed[row // 48, :, row % 48] = rows

    Source: as linear_packed.
    """
    torch.ops.infini.pack_linear.default(packed, weight, first_row)


def fake(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def reference(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    return LINEAR.reference(x, unpack_linear(weight, n, x.shape[-1]), bias)


def peer(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, unpack_linear(weight, n, x.shape[-1]), bias)


def fake_pack(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    return None


def peer_pack(packed: Tensor, weight: Tensor, first_row: int = 0) -> None:
    rows = torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2)) if weight.numel() else weight
    row = torch.arange(first_row, first_row + weight.shape[0])
    if weight.numel():
        packed[row // PANEL, :, row % PANEL] = rows


def reference_pack(packed: Tensor, weight: Tensor, first_row: int = 0) -> tuple[Tensor]:
    after = packed.clone()
    peer_pack(after, weight, first_row)
    return (after.double(),)


def inputs(
    dtype: torch.dtype, *rows: int, k: int, n: int, bias: bool = False
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """(x, weight, n, bias); what a packed weight has beyond n rows is NaN, for it must not matter."""
    x, weight, b = plain_inputs(dtype, *rows, k=k, n=n, bias=bias)
    packed = torch.full(packed_shape(n, k), torch.nan, dtype=dtype)
    peer_pack(packed, weight)
    return x, packed, n, b


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 2, 7, 31, 64, 769, 5125):
        yield Sample(f"{k} columns", inputs(dtype, 1, k=k, n=19))
    for n in (1, 47, 48, 49, 96, 500):
        yield Sample(f"{n} rows of the weight", inputs(dtype, 1, k=70, n=n, bias=True))
    for rows in (*range(2, 12), 18, 19, 28):
        yield Sample(f"{rows} rows", inputs(dtype, rows, k=333, n=61, bias=True))
    yield Sample("several blocks of columns", inputs(dtype, 20, k=2500, n=100))
    yield Sample("a row, several blocks of columns", inputs(dtype, 1, k=2500, n=100, bias=True))
    yield Sample("one dimension", inputs(dtype, k=65, n=33, bias=True))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 5, k=96, n=70))
    yield Sample("one output column", inputs(dtype, 2, k=40, n=1, bias=True))
    yield Sample("no rows", inputs(dtype, 0, k=16, n=8))
    yield Sample("no outputs", inputs(dtype, 4, k=16, n=0))
    yield Sample("no columns", inputs(dtype, 4, k=0, n=20))
    yield Sample("no columns, bias", inputs(dtype, 4, k=0, n=20, bias=True))
    x, packed, _, bias = inputs(dtype, 3, k=30, n=200, bias=True)
    assert bias is not None
    yield Sample("the first rows of a weight", (x, packed, 50, bias[:50]))
    yield Sample("several threads", inputs(dtype, 2, k=1024, n=1100, bias=True))
    yield Sample("many rows", inputs(dtype, 3, 50, k=256, n=200, bias=True))
    yield Sample("more rows than one pass has", inputs(dtype, 1030, k=33, n=50, bias=True))


def errors() -> Iterator[ErrorCase]:
    x, weight, n, bias = inputs(torch.bfloat16, 2, k=16, n=8, bias=True)
    assert bias is not None
    op = "infini::linear_packed: "
    yield ErrorCase("scalar", (x[0, 0], weight, n), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float32", (x.float(), weight, n), op + "x must be bfloat16, got float32")
    yield ErrorCase("weight rank", (x, weight[0], n), op + "weight must have 4 dimensions, got 3 (shape [8, 48, 2])")
    yield ErrorCase("weight dtype", (x, weight.half(), n), op + "weight must be bfloat16, got float16")
    yield ErrorCase(
        "weight of other columns",
        (x[:, :13], weight, n),
        op + "weight must have shape [1, 7, 48, 2] of panels of 48 rows, two elements a word, got [1, 8, 48, 2]",
    )
    yield ErrorCase(
        "weight is a part",
        (x[:, :8], torch.cat((weight, weight))[:, :4], n),
        op + "weight must be contiguous, got strides [768, 96, 2, 1]",
    )
    for wrong in (-1, 49):
        yield ErrorCase(
            f"n {wrong}",
            (x, weight, wrong),
            op + f"n must be 0 to 48, the rows that weight has room for, got {wrong}",
        )
    yield ErrorCase(
        "x's columns apart",
        (torch.cat((x, x), 1)[:, ::2], weight, n),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
    )
    yield ErrorCase(
        "bias too long",
        (x, weight, n, torch.ones(9, dtype=torch.bfloat16)),
        op + "bias must have shape [8] to match n, got [9]",
    )
    yield ErrorCase(
        "bias dtype", (x, weight, n, bias.float()), op + "bias must have the dtype of x, bfloat16, got float32"
    )
    yield ErrorCase(
        "bias strides",
        (x, weight, n, torch.ones(16, dtype=torch.bfloat16)[::2]),
        op + "bias must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
    )
    yield ErrorCase("meta weight", (x, weight.to("meta"), n), op + "weight must be on the device of x, cpu, got meta")

    def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        return {"out": torch.empty(shape, dtype=dtype)}

    yield ErrorCase(
        "out shape",
        (x, weight, n),
        op + "out must have shape [2, 8], the rows of x by n, got [8, 2]",
        out(8, 2),
    )
    yield ErrorCase(
        "out dtype",
        (x, weight, n),
        op + "out must have the dtype of x, bfloat16, got float16",
        out(2, 8, dtype=torch.half),
    )
    yield ErrorCase(
        "out strides",
        (x, weight, n),
        op + "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 2]",
        {"out": torch.empty(8, 2, dtype=torch.bfloat16).t()},
    )
    yield ErrorCase(
        "out is a broadcast view",
        (x, weight, n),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8, dtype=torch.bfloat16).expand(2, 8)},
    )
    inside = {"x": x.view(-1)[:16], "weight": weight.view(-1)[:16]}
    for name, memory in inside.items():
        yield ErrorCase(
            f"out overlaps {name}",
            (x, weight, n),
            op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
            {"out": memory.view(2, 8)},
        )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], weight, n, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 8)},
    )


def pack_inputs(dtype: torch.dtype, n: int, k: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(packed, weight); rows of weight, of n that packed has room for."""
    packed = torch.arange(1, 1 + packed_shape(n, k)[0] * PANEL * 2 * packed_shape(n, k)[1]).view(packed_shape(n, k))
    weight = plain_inputs(dtype, 1, k=k, n=n if rows is None else rows)[1]
    return (-packed).to(dtype), weight


def pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 2, 7, 31, 32, 33, 64, 769):
        yield Sample(f"{k} columns", pack_inputs(dtype, 50, k))
    for n in (1, 15, 16, 17, 47, 48, 49, 96, 150):
        yield Sample(f"{n} rows", pack_inputs(dtype, n, 34))
    for rows, first_row in ((1, 0), (1, 49), (5, 14), (16, 16), (20, 44), (90, 3), (96, 0), (0, 96)):
        yield Sample(f"{rows} rows from {first_row} on", (*pack_inputs(dtype, 96, 39, rows), first_row))
    packed, weight = pack_inputs(dtype, 60, 40)
    yield Sample("rows apart", (packed, torch.cat((weight, weight), 1)[:, :40], 0))
    yield Sample("no rows", pack_inputs(dtype, 0, 8))
    yield Sample("no columns", pack_inputs(dtype, 8, 0))
    yield Sample("several threads", (*pack_inputs(dtype, 1100, 1024, 1080), 7))


def pack_errors() -> Iterator[ErrorCase]:
    packed, weight = pack_inputs(torch.bfloat16, 48, 16)
    op = "infini::pack_linear: "
    yield ErrorCase("weight rank", (packed, weight[0]), op + "weight must have 2 dimensions, got 1 (shape [16])")
    yield ErrorCase("weight dtype", (packed, weight.float()), op + "weight must be bfloat16, got float32")
    yield ErrorCase(
        "weight's columns apart",
        (packed[:, :4].contiguous(), weight[:, ::2]),
        op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase("packed rank", (packed[0], weight), op + "packed must have 4 dimensions, got 3 (shape [8, 48, 2])")
    yield ErrorCase("packed dtype", (packed.half(), weight), op + "packed must be bfloat16, got float16")
    yield ErrorCase(
        "other columns",
        (packed, weight[:, :13]),
        op + "packed must have shape [1, 7, 48, 2] of panels of 48 rows, two elements a word, got [1, 8, 48, 2]",
    )
    yield ErrorCase(
        "packed is a part",
        (torch.cat((packed, packed))[:, :4], weight[:, :8]),
        op + "packed must be contiguous, got strides [768, 96, 2, 1]",
    )
    for first_row in (-1, 1):
        yield ErrorCase(
            f"from {first_row} on",
            (packed, weight, first_row),
            op + f"first_row must leave room for 48 of the 48 rows of packed, got {first_row}",
        )
    yield ErrorCase(
        "meta weight", (packed, weight.to("meta")), op + "weight must be on the device of packed, cpu, got meta"
    )
    yield ErrorCase(
        "packed overlaps weight",
        (packed, packed.view(48, 16)),
        op + "packed must share no memory with weight, got one whose span of memory overlaps it",
    )


def cost(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Cost:
    rows, k = x.shape[:-1].numel(), x.shape[-1]
    return Cost(bytes=nbytes(x, bias) + (n * k + rows * n) * x.element_size(), flops=2 * rows * n * k)


def pack_cost(packed: Tensor, weight: Tensor, first_row: int = 0) -> Cost:
    return Cost(bytes=2 * nbytes(weight))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    shapes = [(1, 2048, 5632), (1, 5632, 2048), (1, 2048, 32000)]
    shapes += [(rows, 2048, 5632) for rows in (4, 8, 16, 32)] + [(512, 2048, 2048)]
    for rows, k, n in shapes:
        yield Sample(f"{rows}x{k}->{n}", inputs(dtype, rows, k=k, n=n))


def pack_bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("5632x2048", pack_inputs(dtype, 5632, 2048))


SPECS = [
    OpSpec(
        name="linear_packed",
        schema="(Tensor x, Tensor weight, int n, Tensor? bias=None) -> Tensor",
        function=linear_packed,
        fake=fake,
        reference=reference,
        samples=samples,
        errors=errors,
        cost=cost,
        bench=bench,
        peer=peer,
        dtypes=(torch.bfloat16,),
        contiguous=("weight",),
        tolerances=LINEAR.tolerances,
        devices=("cpu",),
    ),
    OpSpec(
        name="pack_linear",
        schema="(Tensor(a!) packed, Tensor weight, int first_row=0) -> ()",
        function=pack_linear,
        fake=fake_pack,
        reference=reference_pack,
        samples=pack_samples,
        errors=pack_errors,
        cost=pack_cost,
        bench=pack_bench,
        peer=peer_pack,
        dtypes=(torch.bfloat16,),
        contiguous=("packed",),
        devices=("cpu",),
    ),
]
