"""embedding: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import FLOATS
from ...ops.embedding import SPEC
from ..c_door import c_op
from ..c_ops import CSample, Described
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(ids: Tensor, weight: Tensor, first: int = 0, total: int | None = None) -> Tensor:
    rows = weight.shape[0] if total is None else total
    return torch.nn.functional.pad(weight.double(), (0, 0, first, rows - first - weight.shape[0]))[ids.long()]


def peer(ids: Tensor, weight: Tensor, first: int = 0, total: int | None = None) -> Tensor:
    if total is not None:
        weight = torch.nn.functional.pad(weight, (0, 0, first, total - first - weight.shape[0]))
    return torch.nn.functional.embedding(ids, weight)


def inputs(dtype: torch.dtype, shape: tuple[int, ...], v: int, n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    weight = torch.empty(v, n, dtype=dtype)
    return torch.randint(max(v, 1), shape, generator=g), weight.normal_(generator=g)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", inputs(dtype, (5,), 11, n))
    yield Sample("one id", inputs(dtype, (), 11, 32))
    yield Sample("three dimensions of ids", inputs(dtype, (2, 3, 4), 11, 32))
    ids, weight = inputs(dtype, (2, 9), 11, 32)
    yield Sample("int32 ids", (ids.int(), weight))
    yield Sample("every second id of int32, transposed", (ids.int()[:, ::2].t(), weight))
    yield Sample("one id for all", (ids[:1, :1].expand(3, 4), weight))
    yield Sample("first and last row", (torch.tensor([0, 10, 10, 0]), weight))
    yield Sample("no ids", inputs(dtype, (0, 3), 11, 32))
    yield Sample("no columns", inputs(dtype, (4,), 11, 0))
    yield Sample("no rows and no ids", inputs(dtype, (0,), 0, 32))
    yield Sample("large", inputs(dtype, (300,), 1000, 2048))
    for name, shape, n in (("", (40,), 33), (", large", (300,), 2048), (", int32", (3, 20), 8)):
        ids, weight = inputs(dtype, shape, 90, n)
        ids = ids.int() if name == ", int32" else ids
        yield Sample(f"the first part of a table{name}", (ids, weight[:31], 0, 90))
        yield Sample(f"a part of a table{name}", (ids, weight[31:60], 31, 90))
        yield Sample(f"the last part of a table{name}", (ids, weight[60:], 60, 90))
    yield Sample("no part of a table", (ids, weight[:0], 7, 90))


def errors() -> Iterator[ErrorCase]:
    ids, weight = inputs(torch.float32, (4,), 32000, 4)
    op = "infini::embedding: "
    outside = op + "ids must be at least 0 and less than 32000, the number of rows of weight, got "

    def outside_case(name: str, ids: Tensor, weight: Tensor, message: str) -> ErrorCase:
        return ErrorCase(name, (ids, weight), message, of_values=True)

    yield outside_case("too large", torch.tensor([1, 2, 31999, 40000, 50000]), weight, outside + "40000 at ids[3]")
    yield outside_case("one too large", torch.tensor([[0, 0], [0, 32000]]), weight, outside + "32000 at ids[1, 1]")
    yield outside_case("negative", torch.tensor([[-1], [5]]).int(), weight, outside + "-1 at ids[0, 0]")
    yield outside_case("one id, too large", torch.tensor(2**40), weight, outside + str(2**40))
    # Row-major order of the view, not of the memory.
    transposed = torch.tensor([[0, -7], [-8, 0]]).t()
    yield outside_case("first of several in a transposed view", transposed, weight, outside + "-8 at ids[0, 1]")
    yield outside_case("too large, no columns", torch.tensor([32000]), weight[:, :0], outside + "32000 at ids[0]")
    yield outside_case(
        "empty table",
        ids,
        weight[:0],
        op + f"ids must be at least 0 and less than 0, the number of rows of weight, got {int(ids[0])} at ids[0]",
    )
    yield ErrorCase(
        "beyond a table",
        (torch.tensor([5, 90]), weight[:30], 30, 90),
        op + "ids must be at least 0 and less than 90, the total, got 90 at ids[1]",
        of_values=True,
    )
    yield ErrorCase("first", (ids, weight, -1, 32000), op + "first must be at least 0, got -1")
    yield ErrorCase(
        "total",
        (ids, weight, 5, 32000),
        op + "total must be at least first and the rows of weight, 5 + 32000, got 32000",
    )
    yield ErrorCase("ids dtype", (ids.float(), weight), op + "ids must be int64 or int32, got float32")
    yield ErrorCase(
        "weight dtype", (ids, weight.double()), op + "weight must be float32, bfloat16 or float16, got float64"
    )
    yield ErrorCase("weight rank", (ids, weight[0]), op + "weight must have 2 dimensions, got 1 (shape [4])")
    yield ErrorCase(
        "weight transposed",
        (ids, weight[:5].t()),
        op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
    )
    yield ErrorCase("meta weight", (ids, weight.to("meta")), op + "weight must be on the device of ids, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (ids, weight),
        op + "out must have shape [4, 4], that of ids and a row of weight, got [4, 3]",
        {"out": torch.empty(4, 3)},
    )
    yield ErrorCase(
        "out is weight",
        (ids, weight[:4]),
        op + "out must share no memory with weight, got weight itself",
        {"out": weight[:4]},
    )


def cost(ids: Tensor, weight: Tensor, first: int = 0, total: int | None = None) -> Cost:
    return Cost(bytes=nbytes(ids) + 2 * ids.numel() * weight.shape[1] * weight.element_size())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens, columns in ((512, 4096), (16384, 4096), (1, 2048)):
        yield Sample(f"{tokens}x{columns}", inputs(dtype, (tokens,), 32000, columns))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=dict.fromkeys(FLOATS, (0.0, 0.0)),
)


def c_samples() -> Iterator[CSample]:
    """Yield strides that torch lacks: rows and ids in reverse order, and a table that repeats one row."""
    for dtype in FLOATS:
        kind = str(dtype).removeprefix("torch.")
        ids, weight = inputs(dtype, (3, 5), 11, 40)
        out = torch.full((3, 5, 40), 77.0, dtype=dtype)
        turned = {
            "out": Described(out, (3, 5, 40), (-200, -40, 1), 14 * 40),
            "ids": Described(ids, (3, 5), (-5, -1), 14),
            "weight": Described(weight, (11, 40), (-40, 1), 400),
        }
        yield CSample(f"{kind} all backwards", turned)
        repeated = {"out": out.clone(), "ids": ids, "weight": Described(weight, (11, 40), (0, 1), 80)}
        yield CSample(f"{kind} one row for all", repeated)
        single = {"out": out[:, :, :1].clone(), "ids": ids, "weight": Described(weight, (11, 1), (40, 7))}
        yield CSample(f"{kind} one column of any stride", single)


C_OPS = [c_op(INFO, "Embedding", ["out"], fixed={"first": 0, "total": None}, samples=c_samples)]
