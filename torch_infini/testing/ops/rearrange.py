"""rearrange: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._core.dtypes import InfiniDtype
from ...ops import FLOATS
from ...ops.rearrange import SPEC
from ..c_door import all_but, c_op, unwritten
from ..c_layouts import every_layout
from ..c_ops import DTYPES, CErrorCase, CSample, Described
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(x: Tensor) -> Tensor:
    return x.double()


def peer(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make values such that neighbours differ in every byte."""
    g = torch.Generator().manual_seed(0)
    if dtype.is_floating_point or dtype == torch.bool:
        return (
            (torch.randn(shape, generator=g) * 100).to(dtype)
            if dtype != torch.bool
            else torch.rand(shape, generator=g) < 0.5
        )
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, generator=g, dtype=dtype)


# Views of a contiguous tensor that callers make: description, shape, view.
LAYOUTS: tuple[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]], ...] = (
    ("transposed", (300, 70), lambda t: t.t()),
    ("transposed, one line", (64, 32), lambda t: t.t()),
    ("contiguous", (65, 131), lambda t: t),
    ("heads before tokens", (2, 17, 6, 40), lambda t: t.transpose(1, 2)),
    ("narrow, transposed", (2, 300), lambda t: t.t()),
    ("wide, transposed", (300, 2), lambda t: t.t()),
    ("rows apart", (9, 70), lambda t: t[:, 3:40]),
    ("every third", (9, 70), lambda t: t[:, ::3]),
    ("every third, transposed", (90, 70), lambda t: t[:, ::3].t()),
    ("runs of two", (11, 6, 2), lambda t: t.transpose(0, 1)),
    ("runs of three", (11, 6, 3), lambda t: t.transpose(0, 1)),
    ("runs of four", (11, 6, 4), lambda t: t.transpose(0, 1)),
    ("runs of eight", (11, 6, 8), lambda t: t.transpose(0, 1)),
    ("five dimensions", (2, 3, 4, 5, 6), lambda t: t.permute(4, 1, 3, 0, 2)),
    ("eight dimensions", (2, 1, 2, 3, 2, 2, 1, 3), lambda t: t.permute(7, 2, 5, 0, 3, 6, 1, 4)),
    ("one row for all", (1, 70), lambda t: t.expand(9, 70)),
    ("one column for all", (9, 1), lambda t: t.expand(9, 70)),
    ("one number for all", (), lambda t: t.expand(9, 70)),
    ("channels last", (2, 5, 6, 17), lambda t: t.permute(0, 3, 1, 2)),
)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape, view in LAYOUTS:
        yield Sample(name, (view(values(dtype, *shape)),))
    for other in (torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        yield Sample(f"transposed, {str(other)[6:]}", (values(other, 67, 130).t(),))
    yield Sample("scalar", (values(dtype),))
    yield Sample("no rows", (values(dtype, 0, 16),))
    yield Sample("no columns", (values(dtype, 4, 0).t(),))
    yield Sample("large, transposed", (values(dtype, 500, 301).t(),))
    yield Sample("large", (values(dtype, 100, 1501),))
    if not dtype.is_floating_point:
        return
    info = torch.finfo(dtype)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, info.tiny, info.smallest_normal / 4, info.max])
    yield Sample("special values", (special.to(dtype).view(7, 1).repeat(1, 20).t(),))


def errors() -> Iterator[ErrorCase]:
    x, op = values(torch.float32, 2, 16), "infini::rearrange: "
    some = "float64, float32, bfloat16, float16, bool or an integer of 8 to 64 bits"
    yield ErrorCase("complex", (x.to(torch.complex64),), op + f"x must be {some}, got complex64")
    yield ErrorCase(
        "out shape", (x,), op + "out must have the shape of x, [2, 16], got [16, 2]", {"out": torch.empty(16, 2)}
    )
    yield ErrorCase(
        "out dtype",
        (x,),
        op + "out must have the dtype of x, float32, got int32",
        {"out": torch.empty(2, 16, dtype=torch.int32)},
    )
    yield ErrorCase(
        "out broadcast",
        (x,),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(1, 16).expand(2, 16)},
    )
    square = values(torch.float32, 16, 16)
    yield ErrorCase(
        "transposed onto itself",
        (square,),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": square.t()},
    )


def cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(x))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x32x128 heads first", (values(dtype, 512, 32, 128).transpose(0, 1),))
    yield Sample("4096x4096 transposed", (values(dtype, 4096, 4096).t(),))
    yield Sample("512x4096 of 512x12288", (values(dtype, 512, 12288)[:, 4096:8192],))
    yield Sample("512x4096", (values(dtype, 512, 4096),))


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


def to_the_bit(sample: CSample, outputs: dict[str, Tensor]) -> None:
    dst, src = (t.contiguous().reshape(-1).view(torch.uint8) for t in (outputs["dst"], sample.args["src"]))
    assert torch.equal(dst, src), sample.name


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return every_layout(args, ["dst"])


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((2, 300), (300, 2), (65, 131), (3, 4, 5, 6)):
        yield Sample(" by ".join(map(str, shape)), (values(dtype, *shape),))


def c_samples() -> Iterator[CSample]:
    """Yield every dtype that a descriptor may have, including one of 16 bytes."""
    for dtype in DTYPES:
        src = torch.randint(0, 2, (3, 5, 7)).to(dtype)
        yield CSample(f"{dtype}", {"dst": unwritten((3, 5, 7), dtype), "src": src})
        yield CSample(f"{dtype} transposed", {"dst": unwritten((7, 5, 3), dtype), "src": src.permute(2, 1, 0)})
    complex128 = int(InfiniDtype.C128)
    for strides in ((1, 17), (20, 1), (-1, -17)):
        src, dst = (torch.randn(340, dtype=torch.complex128) for _ in range(2))
        from_ = Described(src, (17, 20), strides, 0 if strides[0] > 0 else 339, complex128)
        to = Described(dst, (17, 20), (20, 1), 0, complex128)
        yield CSample(f"complex128 {strides}", {"dst": to, "src": from_})


def c_errors() -> Iterator[CErrorCase]:
    """Yield calls that must fail. dst comes first: src must match its shape and dtype."""
    dst, src = torch.ones(2, 3), torch.ones(2, 3)
    op = "infini::rearrange: "
    for name, args, status, rule in (
        ("shape", {"dst": dst, "src": src.t()}, "SHAPE", "src must have the shape of dst, [2, 3], got [3, 2]"),
        ("dtype", {"dst": dst, "src": src.int()}, "DTYPE", "src must have the dtype of dst, float32, got int32"),
    ):
        yield CErrorCase(name, args, f"BAD_TENSOR_{status}", op + rule)


# Elements of 1, 2, 4 and 8 bytes; the kernel knows only their size.
C_OPS = [
    c_op(
        INFO,
        "Rearrange",
        ["dst"],
        {"x": "src"},
        samples=c_samples,
        errors=c_errors,
        words={"out": "dst", "x": "src"},
        refuses=all_but("out shape", "out dtype"),
        dtypes=(torch.int8, torch.int16, torch.int32, torch.int64),
        variants=c_layouts,
        varied=c_varied,
        compare=to_the_bit,
    )
]
