"""linear_table4 and linear_group8: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops import OpSpec
from ...ops._panels import GROUPS, PANEL, TABLE4, Panels
from ...ops.linear_table4 import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import INFO as LINEAR
from .linear import inputs as of_linear


@lru_cache(256)  # quantizing in plain torch takes most of the samples' time, and tests make them many times
def packed_weight(panels: Panels, dtype: torch.dtype, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Return a packed weight and its scales, not to be written."""
    _, dense, _ = of_linear(dtype, 1, k=k, n=n)
    indices, group_scales, scales = panels.quantize(dense)
    packed = torch.full(panels.packed_shape(n, k), 0x7D, dtype=torch.uint8)
    panels.put_rows(packed, torch.arange(n), indices, group_scales)
    return packed, scales


class Linear:
    """The tests of a product with weights of a format; extreme: the largest element's byte."""

    def __init__(self, spec: OpSpec, panels: Panels, extreme: int) -> None:
        self.spec, self.panels, self.largest = spec, panels, extreme

    def reference(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the exact bits: sums of a run are integers, and runs are added in float32 in order."""
        n, k = scales.shape[0], x.shape[-1]
        q, run_scales = self.panels.quantize_x(x)
        runs = q.shape[-2]
        integers = self.panels.integers(weight, n, k)
        w = torch.nn.functional.pad(integers, (0, runs * self.panels.run - k)).view(n, runs, self.panels.run)
        total = x.new_zeros((*x.shape[:-1], n), dtype=torch.float32)
        for run in range(runs):
            products = (q[..., run, :].double() @ w[:, run].t().double()).float()
            total = total + run_scales[..., run, None] * products
        y = total * scales
        return (y if bias is None else y + bias.float()).to(x.dtype).double()

    def same_bits(self, actual: Tensor, sample: Sample) -> None:
        expected = self.reference(*sample.args)
        assert torch.equal(actual.double().nan_to_num(1e300), expected.nan_to_num(1e300)), sample.name

    def peer(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, self.panels.dequantize(weight, scales, x.shape[-1], x.dtype), bias)

    def inputs(
        self, dtype: torch.dtype, *rows: int, k: int, n: int, bias: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Make (x, weight, scales, bias). Padding beyond n rows and k columns must not affect the result."""
        x, _, b = of_linear(dtype, *rows, k=k, n=n, bias=bias)
        packed, scales = packed_weight(self.panels, dtype, k, n)
        return x, packed.clone(), scales.clone(), b

    def samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        for k in (1, 15, 16, 63, 64, 65, 127, 128, 129, 769, 5125):
            yield Sample(f"{k} columns", self.inputs(dtype, 1, k=k, n=19))
        for n in (1, 15, 16, 17, 48, 500):
            yield Sample(f"{n} rows of the weight", self.inputs(dtype, 1, k=70, n=n, bias=True))
        for rows in (*range(2, 12), 16, 17, 28, 31, 32, 33, 47):
            yield Sample(f"{rows} rows", self.inputs(dtype, rows, k=333, n=61, bias=True))
        for k in (1, 63, 64, 65, 127, 128, 129, 769, 5125):  # also for tile registers, which take many rows
            yield Sample(f"33 rows of {k} columns", self.inputs(dtype, 33, k=k, n=19))
        yield Sample("one dimension", self.inputs(dtype, k=65, n=33, bias=True))
        yield Sample("four dimensions", self.inputs(dtype, 2, 3, 5, k=96, n=70))
        yield Sample("no rows", self.inputs(dtype, 0, k=16, n=8))
        yield Sample("no outputs", self.inputs(dtype, 4, k=16, n=0))
        yield Sample("no columns", self.inputs(dtype, 4, k=0, n=20))
        yield Sample("no columns, bias", self.inputs(dtype, 4, k=0, n=20, bias=True))
        for rows in (3, 35):
            x, packed, scales, bias = self.inputs(dtype, rows, k=130, n=200, bias=True)
            assert bias is not None
            yield Sample(f"{rows} rows, the first of a weight", (x, packed, scales[:50], bias[:50]))
            for sign, value in (("", -3.0), ("negative ", 3.0)):
                yield Sample(
                    f"{rows} rows, largest {sign}sums", (torch.full_like(x, value), self.extreme(packed), scales)
                )
            yield Sample(f"{rows} rows of zeros", (torch.zeros_like(x), packed, scales, bias))
            for name, value in (("infinity", torch.inf), ("NaN", torch.nan)):
                broken = x.clone()
                broken[1, 129] = value
                yield Sample(f"{rows} rows, {name} in x", (broken, packed, scales, bias))
            yield Sample(f"{rows} rows, several threads", self.inputs(dtype, rows, k=1024, n=1100, bias=True))
        for rows in (270, 530):
            yield Sample(f"more rows than one pass has: {rows}", self.inputs(dtype, rows, k=33, n=50, bias=True))
        yield Sample("x beyond a cache", self.inputs(dtype, 290, k=5125, n=33))

    def extreme(self, packed: Tensor) -> Tensor:
        """Return a weight with the largest elements and the scale -127 everywhere, for the largest sums of a run."""
        made = torch.full_like(packed, self.largest)
        made[..., : GROUPS * PANEL] = 129
        return made

    def errors(self) -> Iterator[ErrorCase]:
        x, weight, scales, bias = self.inputs(torch.float32, 2, k=70, n=8, bias=True)
        assert bias is not None
        op, size = f"infini::{self.spec.name}: ", self.panels.block_bytes
        yield ErrorCase("scalar", (x[0, 0], weight, scales), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
        yield ErrorCase(
            "float64", (x.double(), weight, scales), op + "x must be float32, bfloat16 or float16, got float64"
        )
        yield ErrorCase(
            "weight rank", (x, weight[0], scales), op + f"weight must have 3 dimensions, got 2 (shape [2, {size}])"
        )
        yield ErrorCase("weight dtype", (x, weight.view(torch.int8), scales), op + "weight must be uint8, got int8")
        yield ErrorCase(
            "weight of other columns",
            (x[:, :64], weight, scales),
            f"{op}weight must have shape [1, 1, {size}] of panels of 16 rows, in blocks of 64 columns, "
            f"got [1, 2, {size}]",
        )
        yield ErrorCase(
            "weight is a part",
            (x[:, :64], torch.cat((weight, weight))[:, :1], scales),
            op + f"weight must be contiguous, got strides [{2 * size}, {size}, 1]",
        )
        yield ErrorCase(
            "scales rank", (x, weight, scales[None]), op + "scales must have 1 dimension, got 2 (shape [1, 8])"
        )
        yield ErrorCase("scales dtype", (x, weight, scales.half()), op + "scales must be float32, got float16")
        yield ErrorCase(
            "scales apart",
            (x, weight, scales[::2]),
            op + "scales must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
        )
        yield ErrorCase(
            "more scales than rows",
            (x, weight, torch.ones(17)),
            op + "scales must have at most 16 elements, the rows that weight has room for, got 17",
        )
        yield ErrorCase(
            "x's columns apart",
            (torch.cat((x, x), 1)[:, ::2], weight, scales),
            op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [140, 2]",
        )
        yield ErrorCase(
            "bias too long",
            (x, weight, scales, torch.ones(9)),
            op + "bias must have shape [8] to match scales, got [9]",
        )
        yield ErrorCase(
            "bias dtype",
            (x, weight, scales, bias.half()),
            op + "bias must have the dtype of x, float32, got float16",
        )
        yield ErrorCase(
            "meta weight", (x, weight.to("meta"), scales), op + "weight must be on the device of x, cpu, got meta"
        )

        def out(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
            return {"out": torch.empty(shape, dtype=dtype)}

        yield ErrorCase(
            "out shape",
            (x, weight, scales),
            op + "out must have shape [2, 8], the rows of x by the length of scales, got [8, 2]",
            out(8, 2),
        )
        yield ErrorCase(
            "out dtype",
            (x, weight, scales),
            op + "out must have the dtype of x, float32, got float16",
            out(2, 8, dtype=torch.half),
        )
        for name, memory in {"x": x.view(-1)[:16], "weight": weight.view(-1)[:64].view(torch.float32)}.items():
            yield ErrorCase(
                f"out overlaps {name}",
                (x, weight, scales),
                op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
                {"out": memory.view(2, 8)},
            )
        for name, memory in {"scales": scales, "bias": bias}.items():
            yield ErrorCase(
                f"out overlaps {name}",
                (x[:1], weight, scales, bias),
                op + f"out must share no memory with {name}, got one whose span of memory overlaps it",
                {"out": memory.view(1, 8)},
            )

    def cost(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Cost:
        rows, k, n = x.shape[:-1].numel(), x.shape[-1], scales.shape[0]
        return Cost(bytes=nbytes(x, weight, scales, bias) + rows * n * x.element_size(), flops=2 * rows * n * k)

    def bench(self, dtype: torch.dtype) -> Iterator[Sample]:
        for rows, k, n in ((1, 2048, 5632), (1, 5632, 2048), (8, 2048, 5632), (512, 2048, 2048)):
            # One panel's rows again and again: quantizing is slow here, and times do not depend on the values.
            x, packed, scales, _ = self.inputs(dtype, rows, k=k, n=PANEL)
            again = n // PANEL
            yield Sample(f"{rows}x{k}->{n}", (x, packed.repeat(again, 1, 1), scales.repeat(again), None))

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
            compare=self.same_bits,
            tolerances=LINEAR.tolerances,  # for the docstring's example, which sums in another order
        )


INFO = Linear(SPEC, TABLE4, 0).info
