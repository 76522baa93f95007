"""linear_int8 and linear_int4: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops import REGISTRY
from ...weights import dequantize_int4, dequantize_int8, quantize_int8
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import accumulation_error, rounding_error

# ---- a call of either op ----


@dataclass(frozen=True)
class Call:
    """The arguments of a call of linear_int8 or linear_int4."""

    x: Tensor
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    quantize_x: bool
    dense_weight: Callable[[torch.dtype], Tensor]  # the dequantized weight in a dtype

    @property
    def rows(self) -> int:
        return self.x.shape[:-1].numel()


def call_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, quantize_x: bool = False) -> Call:
    return Call(x, weight, scales, None, bias, quantize_x, functools.partial(dequantize_int8, weight, scales))


def call_int4(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    quantize_x: bool = False,
) -> Call:
    return Call(x, weight, scales, zeros, bias, quantize_x, functools.partial(dequantize_int4, weight, scales, zeros))


def reference(call: Call) -> Tensor:
    x = call.x.double()
    if call.quantize_x:
        rows = call.x.reshape(call.rows, call.x.shape[-1])
        x = dequantize_int8(*quantize_int8(rows), torch.float64).view(call.x.shape)
    y = x @ call.dense_weight(torch.float64).t()
    return y if call.bias is None else y + call.bias.double()


def cost(call: Call) -> Cost:
    read, n = (call.x, call.weight, call.scales, call.zeros, call.bias), call.weight.shape[0]
    return Cost(bytes=nbytes(*read) + call.rows * n * call.x.element_size(), flops=2 * call.rows * call.x.shape[-1] * n)


# cuBLAS multiplies x of a half type from this many rows on, float32 from 64: cublas_rows_from of
# csrc/infiniop/quantized_linear/many_rows.cpp. many_rows.h states what is rounded.
CUBLAS_ROWS_FROM = {"linear_int8": 129, "linear_int4": 65}
STREAMED_ROWS = 32  # of a half type or quantized; more are multiplied in tiles, if they are aligned


def by_cublas(call: Call) -> bool:
    """Return whether cuBLAS adds up rounded numbers on CUDA. Its sums of integers are exact in any order."""
    half = CUBLAS_ROWS_FROM["linear_int8" if call.weight.dtype == torch.int8 else "linear_int4"]
    return call.rows >= (64 if call.x.dtype == torch.float32 else half) and not call.quantize_x


def same_bits(call: Call) -> bool:
    """Return whether a call has the same bits in any layout on CUDA: if it is streamed, or all sums are exact."""
    exact = call.quantize_x and call.weight.dtype == torch.int8
    streamed = call.rows <= STREAMED_ROWS or (call.x.dtype == torch.float32 and not call.quantize_x)
    return exact or (streamed and not by_cublas(call))


def cuda_slack(expected: Tensor, call: Call) -> Tensor:
    """Return the error of cuBLAS's order of sums, and for int4 of rounding weights to the dtype of x."""
    if not by_cublas(call):
        return torch.zeros_like(expected)
    weight = call.dense_weight(torch.float64)
    size = (call.x.double().square() @ weight.square().t()).sqrt()  # the root of the sum of the products' squares
    slack = accumulation_error(size, call.x.dtype, call.x.shape[-1])
    return slack + rounding_error(size, call.x.dtype) if call.weight.dtype == torch.uint8 else slack


def peer_int8(call: Call) -> Tensor:
    """Call torch's own op if it supports the call, a dense product otherwise."""
    x, weight = call.x, call.weight
    if x.dtype == torch.bfloat16 and x.dim() == 2 and x.shape[1] % 32 == 0 and 0 not in (*x.shape, *weight.shape):
        y = torch.ops.aten._weight_int8pack_mm(x, weight, call.scales.bfloat16())
        return y if call.bias is None else y + call.bias
    return torch.nn.functional.linear(x, weight.to(x.dtype) * call.scales[:, None].to(x.dtype), call.bias)


def peer_int4(call: Call) -> Tensor:
    """Compute a dense product. (torch's own op needs its own packing: benchmarks/quantized.py compares with it.)"""
    return torch.nn.functional.linear(call.x, call.dense_weight(call.x.dtype), call.bias)


def values(g: torch.Generator, *shape: int) -> Tensor:
    """Make values of either sign and 0.5 to 1.5 in magnitude, so that a missing product is noticed."""
    return (0.5 + torch.rand(shape, generator=g)) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)


SHAPES = [(rows, 4096, n) for rows in (1, 8, 32) for n in (4096, 14336)]  # of the benchmarks
# One rounding of a result of order 1, plus the error of float sums of products of order 1 / sqrt(k), however much of
# them cancels. A missing product of 5125 changes the result by 7e-3 on average.
TOLERANCES = {
    torch.float32: (1e-6, 6e-6),
    torch.bfloat16: (2**-8, 6e-6),
    torch.float16: (2**-11, 6e-6),
}


# ---- linear_int8 ----


def inputs_int8(
    dtype: torch.dtype, *rows: int, k: int, n: int, bias: bool = False, scales_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Make (x, weight, scales, bias): all 255 integers, and results with a spread of about 1."""
    g = torch.Generator().manual_seed(k * 1000 + n)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=g)
    scales = (0.5 + torch.rand(n, generator=g)) / 74 / max(k, 1) ** 0.5
    return values(g, *rows, k).to(dtype), weight, scales.to(scales_dtype), values(g, n).to(dtype) if bias else None


def samples_int8(dtype: torch.dtype) -> Iterator[Sample]:
    for k in (1, 7, 31, 64, 769, 5125):
        yield Sample(f"{k} columns", inputs_int8(dtype, 1, k=k, n=19))
    yield Sample("bias", inputs_int8(dtype, 3, k=100, n=50, bias=True))
    for rows in (2, 4, 5, 12, 13, 33):
        yield Sample(f"{rows} rows", inputs_int8(dtype, rows, k=333, n=61, bias=True))
    yield Sample("scales of the dtype of x", inputs_int8(dtype, 2, k=70, n=40, bias=True, scales_dtype=dtype))
    yield Sample("several blocks of columns", inputs_int8(dtype, 20, k=5000, n=40))
    yield Sample("one row, several blocks", inputs_int8(dtype, 1, k=20000, n=9))
    yield Sample("one dimension", inputs_int8(dtype, k=65, n=33, bias=True))
    yield Sample("four dimensions", inputs_int8(dtype, 2, 3, 5, k=96, n=70))
    yield Sample("one output column", inputs_int8(dtype, 2, k=40, n=1, bias=True))
    yield Sample("no rows", inputs_int8(dtype, 0, k=16, n=8))
    yield Sample("no outputs", inputs_int8(dtype, 4, k=16, n=0))
    yield Sample("no columns", inputs_int8(dtype, 4, k=0, n=20))
    yield Sample("no columns, bias", inputs_int8(dtype, 4, k=0, n=20, bias=True))
    yield Sample("several threads", inputs_int8(dtype, 2, k=1024, n=1100, bias=True))
    yield Sample("many rows", inputs_int8(dtype, 3, 30, k=256, n=200, bias=True))
    yield from quantized_x_samples(inputs_int8, dtype, 77)
    for k in (1, 3, 64, 255, 1028):
        yield Sample(f"x quantized, {k} columns", inputs_int8(dtype, 15, k=k, n=35), {"quantize_x": True})
    x, weight, scales, bias = inputs_int8(dtype, 2, k=131071, n=5, bias=True)
    x.fill_(1)
    weight[:3] = torch.tensor([-128, 127, 1], dtype=torch.int8)[:, None]
    yield Sample("x quantized, largest sums", (x, weight, scales / 64, bias), {"quantize_x": True})


def quantized_x_samples(
    args: Callable[..., tuple[Any, ...]], dtype: torch.dtype, step: int, prefix: str = "x quantized"
) -> Iterator[Sample]:
    """Yield samples with quantize_x; args makes inputs of k columns, k a multiple of step."""
    on = {"quantize_x": True}

    def sample(name: str, *rows: int, k: int, n: int, **more: Any) -> Sample:
        return Sample(f"{prefix}, {name}", args(dtype, *rows, k=k * step, n=n, bias=True, **more), on)

    for k in (1, 2, 3, 7, 20, 65):
        yield sample(f"{k * step} columns", 3, k=k, n=19)
    for k in (1, 3, 15, 16, 17, 65):  # read along k: with whole and partial lines at the end
        yield sample(f"{k * step} columns, one row", 1, k=k, n=19)
    for rows in (1, 2, 4, 5, 11, 12, 13, 24, 25, 40, 200):
        yield sample(f"{rows} rows", rows, k=4, n=67)
    yield sample("several blocks of rows of weight", 30, k=40, n=300)
    yield sample("several passes over the weight", 1030, k=1, n=33)
    yield sample("one dimension", k=4, n=33)
    yield sample("four dimensions", 2, 3, 5, k=3, n=70)
    yield sample("one output column", 14, k=4, n=1)
    yield sample("float32 scales", 5, k=6, n=40, scales_dtype=torch.float32)
    yield sample("scales of the dtype of x", 5, k=6, n=40, scales_dtype=dtype)
    for rows, k, n in ((0, 4, 8), (4, 4, 0), (4, 0, 20), (20, 0, 20)):
        yield sample(f"empty, {rows}x{k * step}->{n}", rows, k=k, n=n)
    x, *rest = args(dtype, 4, k=4 * step, n=50, bias=True)
    x[1], x[2], x[3] = 0, x[2] * 1e4, x[3] * 1e-4
    *weight, bias = rest
    yield Sample(f"{prefix}, a row of zeros, a large and a small one", (x[:2], *rest), on)
    yield Sample(f"{prefix}, small values", (x[3:], *weight, None), on)
    if dtype != torch.float16:
        weight[1] = weight[1] * 1e-4
        if len(weight) == 3:
            weight[2] = weight[2] * 1e-4
        yield Sample(f"{prefix}, large values", (x[2:3], *weight, bias), on)


def common_errors(op: str, args: tuple[Tensor, ...], bias: Tensor) -> Iterator[ErrorCase]:
    """Yield error cases of x, bias and out; x is [2, 64] float32, n = 8. args: x, weight, scales[, zeros of int4]."""
    x, weight, scales = args[:3]
    rest = (weight, scales)
    yield ErrorCase("scalar", (x[0, 0], *rest), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), *rest), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase(
        "weight rank", (x, weight[0], scales), op + f"weight must have 2 dimensions, got 1 (shape [{weight.shape[1]}])"
    )
    strides = "must have stride 1 in its last dimension (call .contiguous() on it), got strides"
    yield ErrorCase("x's columns apart", (torch.ones(2, 128)[:, ::2], *rest), op + f"x {strides} [128, 2]")
    yield ErrorCase(
        "weight's columns apart",
        (x, torch.zeros(*weight.shape, 2, dtype=weight.dtype)[..., 0], scales),
        op + f"weight {strides} [{2 * weight.shape[1]}, 2]",
    )
    yield ErrorCase(
        "scales dtype",
        (x, weight, scales.bfloat16()),
        op + "scales must be float32 or have the dtype of x, float32, got bfloat16",
    )
    yield ErrorCase(
        "bias dtype", (x, *rest), op + "bias must have the dtype of x, float32, got float16", {"bias": bias.half()}
    )
    yield ErrorCase(
        "bias shape",
        (x, *rest),
        op + "bias must have shape [8] to match the rows of weight, got [7]",
        {"bias": bias[:7]},
    )
    yield ErrorCase("bias strides", (x, *rest), op + f"bias {strides} [2]", {"bias": torch.ones(16)[::2]})
    yield ErrorCase(
        "out shape",
        (x, *rest),
        op + "out must have shape [2, 8], the rows of x by the rows of weight, got [2, 7]",
        {"out": torch.empty(2, 7)},
    )
    yield ErrorCase(
        "out dtype",
        (x, *rest),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 8, dtype=torch.half)},
    )
    yield ErrorCase("out strides", (x, *rest), op + f"out {strides} [1, 2]", {"out": torch.empty(8, 2).t()})
    yield ErrorCase(
        "out is a broadcast view",
        (x, *rest),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8).expand(2, 8)},
    )
    shared = "must share no memory with"
    overlaps = "got one whose span of memory overlaps it"
    yield ErrorCase("out is x", (x, *rest), op + f"out {shared} x, {overlaps}", {"out": x[:, :8]})
    yield ErrorCase(
        "out is weight",
        (x, *rest),
        op + f"out {shared} weight, {overlaps}",
        {"out": weight.view(-1)[:64].view(torch.float32).view(2, 8)},
    )
    yield ErrorCase(
        "out overlaps bias",
        (x[:1], *rest),
        op + f"out {shared} bias, {overlaps}",
        {"bias": bias, "out": bias.view(1, 8)},
    )
    for name, tensor in zip(("scales", "zeros"), args[2:], strict=False):
        rows = tensor.numel() // 8
        yield ErrorCase(
            f"out overlaps {name}",
            (x[:rows], *args[1:]),
            op + f"out {shared} {name}, {overlaps}",
            {"out": tensor.view(rows, 8)},
        )


def errors_int8() -> Iterator[ErrorCase]:
    x, weight, scales, bias = inputs_int8(torch.float32, 2, k=64, n=8, bias=True)
    assert bias is not None
    op = "infini::linear_int8: "
    yield from common_errors(op, (x, weight, scales), bias)
    yield ErrorCase("float weight", (x, weight.float(), scales), op + "weight must be int8, got float32")
    yield ErrorCase(
        "weight shape",
        (x, weight[:, :63], scales),
        op + "weight must have shape [8, 64] to match the last dimension of x, got [8, 63]",
    )
    yield ErrorCase(
        "scales shape",
        (x, weight, scales[:7]),
        op + "scales must have shape [8] to match the rows of weight, got [7]",
    )
    x = torch.ones(1, 131072)
    yield ErrorCase(
        "too many columns",
        (x, torch.ones(8, 131072, dtype=torch.int8), scales),
        op + "x must have a last dimension of at most 131071 with quantize_x, got 131072",
        {"quantize_x": True},
    )


# ---- linear_int4 ----


def inputs_int4(
    dtype: torch.dtype,
    *rows: int,
    k: int,
    n: int,
    group: int = 64,
    zeros: bool = True,
    bias: bool = False,
    scales_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Make (x, weight, scales, zeros, bias) with results that have a spread of about 1."""
    g = torch.Generator().manual_seed(k * 1000 + n)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scales = (0.5 + torch.rand(n, k // group, generator=g)) / 5 / max(k, 1) ** 0.5
    shifts = values(g, n, k // group) / max(k, 1) ** 0.5
    kind = scales_dtype or dtype
    return (
        values(g, *rows, k).to(dtype),
        weight,
        scales.to(kind),
        shifts.to(kind) if zeros else None,
        values(g, n).to(dtype) if bias else None,
    )


def samples_int4(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("one group", inputs_int4(dtype, 1, k=64, n=19))
    for group in (32, 64, 128):
        yield Sample(f"groups of {group}", inputs_int4(dtype, 1, k=640, n=21, group=group))
        yield Sample(f"groups of {group}, no zeros", inputs_int4(dtype, 3, k=1152, n=35, group=group, zeros=False))
        yield Sample(f"groups of {group}, an odd number", inputs_int4(dtype, 1, k=7 * group, n=16, group=group))
    for rows in (2, 4, 5, 12, 13, 33):
        yield Sample(f"{rows} rows", inputs_int4(dtype, rows, k=352, n=61, group=32, bias=True))
    yield Sample("float32 scales", inputs_int4(dtype, 2, k=192, n=40, bias=True, scales_dtype=torch.float32))
    yield Sample("several blocks of columns", inputs_int4(dtype, 20, k=4992, n=40))
    yield Sample("one row, several blocks", inputs_int4(dtype, 1, k=20032, n=9))
    yield Sample("one dimension", inputs_int4(dtype, k=64, n=33, bias=True))
    yield Sample("four dimensions", inputs_int4(dtype, 2, 3, 5, k=96, n=70, group=32))
    yield Sample("one output column", inputs_int4(dtype, 2, k=64, n=1, bias=True))
    yield Sample("no rows", inputs_int4(dtype, 0, k=64, n=8))
    yield Sample("no outputs", inputs_int4(dtype, 4, k=64, n=0))
    yield Sample("no columns", inputs_int4(dtype, 4, k=0, n=20))
    yield Sample("no columns, bias", inputs_int4(dtype, 4, k=0, n=20, bias=True))
    yield Sample("several threads", inputs_int4(dtype, 2, k=1024, n=1100, bias=True))
    yield Sample("many rows", inputs_int4(dtype, 3, 30, k=256, n=200, bias=True))
    for group in (32, 64, 128):
        yield from quantized_x_samples(
            functools.partial(inputs_int4, group=group), dtype, group, f"x quantized, groups of {group}"
        )
    for rows in (3, 15):
        args = inputs_int4(dtype, rows, k=384, n=35, zeros=False)
        yield Sample(f"x quantized, {rows} rows, no zeros", args, {"quantize_x": True})


def errors_int4() -> Iterator[ErrorCase]:
    x, weight, scales, zeros, bias = inputs_int4(torch.float32, 2, k=64, n=8, group=32, bias=True)
    assert zeros is not None and bias is not None
    op = "infini::linear_int4: "
    yield from common_errors(op, (x, weight, scales, zeros), bias)
    yield ErrorCase("signed weight", (x, weight.view(torch.int8), scales), op + "weight must be uint8, got int8")
    yield ErrorCase(
        "weight not packed",
        (x, weight.repeat(1, 2), scales),
        op + "weight must have shape [8, 32] two to a byte, to match the last dimension of x, got [8, 64]",
    )
    yield ErrorCase("odd columns", (x[:, :63], weight, scales), op + "x must have an even last dimension, got [2, 63]")
    yield ErrorCase("scales rank", (x, weight, scales[0]), op + "scales must have 2 dimensions, got 1 (shape [2])")
    shape = "scales must have shape [8, 64 / group] with groups of 32, 64 or 128, got"
    yield ErrorCase("scales rows", (x, weight, scales[:7]), op + f"{shape} [7, 2]")
    yield ErrorCase("groups of 16", (x, weight, scales.repeat(1, 2)), op + f"{shape} [8, 4]")
    yield ErrorCase("no groups", (x, weight, scales[:, :0]), op + f"{shape} [8, 0]")
    yield ErrorCase(
        "zeros dtype",
        (x, weight, scales, zeros.half()),
        op + "zeros must have the dtype of scales, float32, got float16",
    )
    yield ErrorCase(
        "zeros shape",
        (x, weight, scales, zeros[:, :1]),
        op + "zeros must have the shape of scales, [8, 2], got [8, 1]",
    )


# ---- both ----


def info(
    name: str,
    call: Callable[..., Call],
    inputs: Callable[..., tuple[Any, ...]],
    samples: Callable[[torch.dtype], Iterator[Sample]],
    errors: Callable[[], Iterator[ErrorCase]],
    peer: Callable[[Call], Tensor],
) -> OpInfo:
    def bench(dtype: torch.dtype) -> Iterator[Sample]:
        for rows, k, n in SHAPES:
            yield Sample(f"{rows}x{k}->{n}", inputs(dtype, rows, k=k, n=n))

    def of(function: Callable[[Call], Any]) -> Callable[..., Any]:
        """Return the function with the op's parameters."""

        @functools.wraps(call)
        def on_arguments(*args: Any, **named: Any) -> Any:
            return function(call(*args, **named))

        return on_arguments

    return OpInfo(
        **vars(REGISTRY[name]),
        reference=of(reference),
        samples=samples,
        errors=errors,
        cost=of(cost),
        bench=bench,
        peer=of(peer),
        tolerances=TOLERANCES,
        same_bits_on_cuda=of(same_bits),
        cuda_slack=lambda expected, *args, **named: cuda_slack(expected, call(*args, **named)),
    )


INFOS = (
    info("linear_int8", call_int8, inputs_int8, samples_int8, errors_int8, peer_int8),
    info("linear_int4", call_int4, inputs_int4, samples_int4, errors_int4, peer_int4),
)
