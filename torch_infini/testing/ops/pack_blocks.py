"""pack_blocks: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops._block_panels import NUMBERS, packed_shape, put_blocks
from ...ops._blocks import KINDS
from ...ops.pack_blocks import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes

KNOWN = ", ".join(f"{number} ({name})" for number, name in sorted(NUMBERS.items()))


def peer(packed: Tensor, weight: Tensor, kind: int, first_row: int = 0) -> None:
    put_blocks(packed, weight, kind, first_row)


def reference(packed: Tensor, weight: Tensor, kind: int, first_row: int = 0) -> tuple[Tensor]:
    after = packed.clone()
    peer(after, weight, kind, first_row)
    return (after.double(),)


def inputs(name: str, n: int, blocks: int, rows: int | None = None) -> tuple[Tensor, Tensor, int]:
    """Make (packed, weight, kind): `rows` rows of a weight of any bytes, for panels with room for n."""
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(n + blocks)
    packed = torch.randint(
        256, packed_shape(kind.number, n, blocks * kind.elements), dtype=torch.uint8, generator=generator
    )
    shape = n if rows is None else rows, blocks, kind.bytes
    return packed, torch.randint(256, shape, dtype=torch.uint8, generator=generator), kind.number


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name in NUMBERS.values():
        yield Sample(name, inputs(name, 32, 3))
    for n in (1, 15, 16, 17, 50):
        yield Sample(f"{n} rows", inputs("q5_k", n, 1))
    for rows, first_row in ((1, 0), (16, 16), (20, 32), (0, 48)):
        yield Sample(f"{rows} rows from {first_row} on", (*inputs("q6_k", 64, 2, rows), first_row))
    packed, weight, kind = inputs("q4_1", 40, 6)
    yield Sample("rows apart", (packed, torch.cat((weight, weight), 1)[:, :6], kind))
    apart = torch.empty(weight.numel() + 1, dtype=torch.uint8)[1:].view(weight.shape).copy_(weight)
    yield Sample("an odd address", (packed, apart, kind))
    yield Sample("no columns", inputs("q8_0", 16, 0))
    yield Sample("several threads", (*inputs("q5_0", 1600, 80, 1520), 16))


def errors_of(op: str, by: int) -> Iterator[ErrorCase]:
    """The error cases of pack_blocks, or with the arguments from `by` on in turns those of unpack_blocks."""
    packed, weight, kind = inputs("q8_0", 32, 3)

    def case(
        name: str, packed: Tensor, weight: Tensor, message: str, kind: int = kind, first_row: int = 0
    ) -> ErrorCase:
        of = (packed, weight) if by == 0 else (weight, packed)
        return ErrorCase(name, (*of, kind, first_row), f"infini::{op}: {message}")

    yield case("unknown kind", packed, weight, f"kind must be one of {KNOWN}, got 1000", 1000)
    yield case("weight rank", packed, weight[0], "weight must have 3 dimensions, got 2 (shape [3, 34])")
    yield case("weight dtype", packed, weight.view(torch.int8), "weight must be uint8, got int8")
    yield case(
        "weight of another kind",
        packed,
        weight[..., :18],
        "weight must have shape [32, 3, 34] of the kind's blocks, got [32, 3, 18]",
    )
    yield case(
        "blocks apart",
        packed,
        torch.cat((weight, weight), 1)[:, ::2],
        "weight must have the blocks of a row adjacent (call .contiguous() on it), got strides [204, 68, 1]",
    )
    yield case("packed rank", packed[0], weight, "packed must have 3 dimensions, got 2 (shape [3, 544])")
    yield case("packed dtype", packed.view(torch.int8), weight, "packed must be uint8, got int8")
    yield case(
        "other columns",
        packed,
        weight[:, :2],
        "packed must have shape [2, 2, 544] of panels of 16 rows of the kind's blocks, got [2, 3, 544]",
    )
    yield case(
        "packed is a part",
        torch.cat((packed, packed), 1)[:, :3],
        weight,
        "packed must be contiguous, got strides [3264, 544, 1]",
    )
    for first_row in (-16, 8, 16):
        yield case(
            f"from {first_row} on",
            packed,
            weight,
            "first_row must be a multiple of 16 and leave room for 32 of the 32 rows of packed, got " + str(first_row),
            first_row=first_row,
        )
    yield case(
        "overlap",
        packed,
        packed.view(32, 3, 34),
        "packed must share no memory with weight, got one whose span of memory overlaps it",
    )


def errors() -> Iterator[ErrorCase]:
    yield from errors_of("pack_blocks", 0)


def cost(packed: Tensor, weight: Tensor, kind: int, first_row: int = 0) -> Cost:
    return Cost(bytes=2 * nbytes(weight))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for name in ("q4_0", "q4_k", "q6_k", "q8_0"):
        yield Sample(f"{name} 5632x2048", inputs(name, 5632, 2048 // KINDS[name].elements))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=(torch.uint8,),
    tolerances={torch.uint8: (0.0, 0.0)},
)
