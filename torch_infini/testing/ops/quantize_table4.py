"""quantize_table4 and quantize_group8: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import FLOATS, OpSpec
from ...ops._panels import BLOCK, PANEL, TABLE4, Panels
from ...ops.quantize_table4 import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import inputs as of_linear
from .quantize import edges


class Quantize:
    """The tests of an op that makes weights of a format."""

    def __init__(self, spec: OpSpec, panels: Panels) -> None:
        self.spec, self.panels = spec, panels

    def peer(self, packed: Tensor, scales: Tensor, weight: Tensor, first_row: int = 0) -> None:
        indices, group_scales, row_scales = self.panels.quantize(weight)
        row = torch.arange(first_row, first_row + weight.shape[0])
        scales[row] = row_scales
        self.panels.put_rows(packed, row, indices, group_scales)

    def reference(self, packed: Tensor, scales: Tensor, weight: Tensor, first_row: int = 0) -> tuple[Tensor, Tensor]:
        after, scales_after = packed.clone(), scales.clone()
        self.peer(after, scales_after, weight, first_row)
        return after.double(), scales_after.double()

    def inputs(self, dtype: torch.dtype, n: int, k: int, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Make (packed, scales, weight): `rows` rows of a weight, for a packed one with room for n."""
        packed = torch.full(self.panels.packed_shape(n, k), 77, dtype=torch.uint8)
        return packed, torch.full((n,), 77.0), of_linear(dtype, 1, k=k, n=n if rows is None else rows)[1]

    def samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        for k in (1, 15, 16, 17, 63, 64, 65, 769):
            yield Sample(f"{k} columns", self.inputs(dtype, 18, k))
        for n in (1, 15, 16, 17, 33, 150):
            yield Sample(f"{n} rows", self.inputs(dtype, n, 34))
        for rows, first_row in ((1, 0), (1, 49), (5, 14), (16, 16), (20, 44), (90, 3), (96, 0), (0, 96)):
            yield Sample(f"{rows} rows from {first_row} on", (*self.inputs(dtype, 96, 39, rows), first_row))
        packed, scales, weight = self.inputs(dtype, 60, 40)
        yield Sample("rows apart", (packed, scales, torch.cat((weight, weight), 1)[:, :40], 0))
        ends = edges(dtype)
        yield Sample("edges", (*self.inputs(dtype, ends.shape[0], 128)[:2], ends))
        column = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
        column[:, 37] *= 1000
        yield Sample("one huge column", (*self.inputs(dtype, 5, 128)[:2], column))
        yield Sample("no rows", self.inputs(dtype, 0, 8))
        yield Sample("no columns", self.inputs(dtype, 8, 0))
        yield Sample("several threads", (*self.inputs(dtype, 1100, 1024, 1080), 7))

    def errors(self) -> Iterator[ErrorCase]:
        packed, scales, weight = self.inputs(torch.float32, 48, 70)
        op, size = f"infini::{self.spec.name}: ", self.panels.block_bytes
        yield ErrorCase(
            "weight rank", (packed, scales, weight[0]), op + "weight must have 2 dimensions, got 1 (shape [70])"
        )
        yield ErrorCase(
            "weight dtype",
            (packed, scales, weight.long()),
            op + "weight must be float32, bfloat16 or float16, got int64",
        )
        yield ErrorCase(
            "weight's columns apart",
            (packed[:, :1].contiguous(), scales, weight[:, ::2]),
            op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [70, 2]",
        )
        yield ErrorCase(
            "packed rank", (packed[0], scales, weight), op + f"packed must have 3 dimensions, got 2 (shape [2, {size}])"
        )
        yield ErrorCase(
            "packed dtype", (packed.view(torch.int8), scales, weight), op + "packed must be uint8, got int8"
        )
        yield ErrorCase(
            "other columns",
            (packed, scales, weight[:, :64]),
            f"{op}packed must have shape [3, 1, {size}] of panels of 16 rows, in blocks of 64 columns, "
            f"got [3, 2, {size}]",
        )
        yield ErrorCase(
            "packed is a part",
            (torch.cat((packed, packed))[:, :1], scales, weight[:, :64]),
            op + f"packed must be contiguous, got strides [{2 * size}, {size}, 1]",
        )
        yield ErrorCase(
            "scales rank", (packed, scales[None], weight), op + "scales must have 1 dimension, got 2 (shape [1, 48])"
        )
        yield ErrorCase("scales dtype", (packed, scales.half(), weight), op + "scales must be float32, got float16")
        for first_row in (-1, 1):
            yield ErrorCase(
                f"from {first_row} on",
                (packed, scales, weight, first_row),
                op + f"first_row must leave room for 48 of the 48 rows of packed and scales, got {first_row}",
            )
        yield ErrorCase(
            "too few scales",
            (packed, scales[:47], weight),
            op + "first_row must leave room for 48 of the 47 rows of packed and scales, got 0",
        )
        yield ErrorCase(
            "meta weight",
            (packed, scales, weight.to("meta")),
            op + "weight must be on the device of packed, cpu, got meta",
        )
        for name, _first, second in (
            ("packed", packed, packed.view(-1)[:3360].view(torch.float32).view(12, 70)),
            ("scales", scales, scales[:48].expand(1, 48)[:, :48]),
        ):
            yield ErrorCase(
                f"{name} overlaps weight",
                (packed if name == "packed" else packed[:, :1].contiguous(), scales, second),
                op + f"{name} must share no memory with weight, got one whose span of memory overlaps it",
            )
        yield ErrorCase(
            "packed overlaps scales",
            (packed, packed.view(-1)[:192].view(torch.float32), weight),
            op + "packed must share no memory with scales, got one whose span of memory overlaps it",
        )

    def cost(self, packed: Tensor, scales: Tensor, weight: Tensor, first_row: int = 0) -> Cost:
        return Cost(bytes=nbytes(weight) + weight.numel() * self.panels.block_bytes // (PANEL * BLOCK))

    def bench(self, dtype: torch.dtype) -> Iterator[Sample]:
        yield Sample("5632x2048", self.inputs(dtype, 5632, 2048))

    @property
    def info(self) -> OpInfo:
        return OpInfo(
            **vars(self.spec),
            reference=self.reference,
            samples=self.samples,
            errors=self.errors,
            cost=self.cost,
            bench=self.bench,
            peer=self.peer,
            tolerances=dict.fromkeys(FLOATS, (0.0, 0.0)),
        )


INFO = Quantize(SPEC, TABLE4).info
