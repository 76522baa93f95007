"""rms_norm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.rms_norm import ROUNDINGS, SPEC, order_of
from ..c_door import c_op
from ..op_info import TOLERANCES, Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Tensor:
    return normalized(x.double(), x.dtype, weight, eps, order_of(rounding))


def normalized(x64: Tensor, dtype: torch.dtype, weight: Tensor, eps: float, order: int) -> Tensor:
    """Compute the norm of a float64 tensor in one of the first three modes; "llama" rounds to dtype."""
    value = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps)
    if order == ROUNDINGS["llama"]:
        return value.to(dtype).double() * weight.double()
    return value * (weight.double() + (order == ROUNDINGS["gemma"]))


def peer(x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Tensor:
    """Compute it as Hugging Face's models do."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def norm_inputs(dtype: torch.dtype, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make (x, weight) as in trained models: x with a spread of 3 and a few large columns, weight around 1."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 3
    x[..., ::97] *= 20
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=g)
    return x.to(dtype), weight.to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", norm_inputs(dtype, 3, n))
    yield Sample("one dimension", norm_inputs(dtype, 64))
    yield Sample("four dimensions", norm_inputs(dtype, 2, 3, 4, 32))
    yield Sample("no rows", norm_inputs(dtype, 0, 16))
    yield Sample("no columns", norm_inputs(dtype, 4, 0))
    yield Sample("large", norm_inputs(dtype, 300, 2048))
    for rounding, number in ROUNDINGS.items():
        x, weight = norm_inputs(dtype, 5, 100)
        yield Sample(rounding, (x, weight, 1e-5, number))
        yield Sample(f"{rounding}, float32 weight", (x, weight.float(), 1e-5, number))
    yield Sample("zeros", (torch.zeros(2, 33, dtype=dtype), torch.ones(33, dtype=dtype)))


def errors() -> Iterator[ErrorCase]:
    x, weight = norm_inputs(torch.float32, 2, 16)
    op = "infini::rms_norm: "
    yield ErrorCase("scalar", (x[0, 0], weight), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase(
        "weight too short",
        (x, weight[:15]),
        op + "weight must have shape [16] to match the last dimension of x, got [15]",
    )
    yield ErrorCase("integers", (x.long(), weight), op + "x must be float32, bfloat16, float16 or float64, got int64")
    yield ErrorCase(
        "weight dtype",
        (x.half(), weight.bfloat16(), 0, 1),
        op + "weight must be float16 as x is, or float32, got bfloat16",
    )
    yield ErrorCase(
        "transposed",
        (x.t(), weight[:2]),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 16]",
    )
    yield ErrorCase("negative eps", (x, weight, -1.0), op + "eps must be a finite number of at least 0, got -1")
    yield ErrorCase("NaN eps", (x, weight, float("nan")), op + "eps must be a finite number of at least 0, got nan")
    yield ErrorCase(
        "eps beyond float32",
        (x, weight, 1e39),
        op + "eps must be a finite number of at least 0 and at most 3.40282e+38, got 1e+39",
    )
    yield ErrorCase(
        "rounding",
        (x, weight, 1e-6, 6),
        op + "rounding must be 0 (once), 1 (llama), 2 (gemma), 3 (wide_once), 4 (wide_llama) or 5 (wide_gemma), got 6",
    )
    yield ErrorCase("meta weight", (x, weight.to("meta")), op + "weight must be on the device of x, cpu, got meta")
    yield ErrorCase(
        "out shape", (x, weight), op + "out must have the shape of x, [2, 16], got [2, 15]", {"out": torch.empty(2, 15)}
    )
    yield ErrorCase(
        "out overlaps",
        (x[:1], weight),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": x.view(-1)[1:17].view(1, 16)},
    )


def cost(x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Cost:
    out = x.numel() * (weight if order_of(rounding) == ROUNDINGS["llama"] else x).element_size()
    return Cost(bytes=nbytes(x, weight) + out, flops=4 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x4096", (*norm_inputs(dtype, 512, 4096), 1e-6, ROUNDINGS["llama"]))
    yield Sample("16384x4096", (*norm_inputs(dtype, 16384, 4096), 1e-6, ROUNDINGS["llama"]))
    yield Sample("1x2048", (*norm_inputs(dtype, 1, 2048), 1e-6, ROUNDINGS["llama"]))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={d: (rtol if d == torch.float32 else 2 * rtol, atol) for d, (rtol, atol) in TOLERANCES.items()},
)


def c_samples() -> Iterator[Sample]:
    """Yield calls with float64, and with weights of the other half type."""
    pairs = ((torch.float64, torch.float64), (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16))
    for dtype, of_weight in pairs:
        for shape in ((2, 3, 769), (300, 2048)):
            x, weight = norm_inputs(dtype, *shape)
            yield Sample(f"{dtype} by {of_weight} {shape}", (x, weight.to(of_weight)))
    x, weight = norm_inputs(torch.float32, 4, 40)
    yield Sample("a broadcast row", (x[:1].expand(4, 40), weight))


C_OPS = [c_op(INFO, "RMSNorm", ["y"], {"weight": "w", "eps": "epsilon"}, {"rounding": 0}, samples=c_samples)]
