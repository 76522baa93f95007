"""quantize_int8 and quantize_int4: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import FLOATS, REGISTRY
from ...ops.quantize import fake_int4, fake_int8
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def peer_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight.float()
    # Without columns there is no maximum.
    largest = rows.abs().amax(1) if weight.shape[1] else rows.new_zeros(weight.shape[0])
    scales = largest / 127
    # Denormal scales may be too small by half a spacing.
    q = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round_().clamp_(-127, 127)
    return q.to(torch.int8), scales


def peer_int4(weight: Tensor, group_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    groups = weight.float().view(n, k // group_size, group_size)
    least, largest = torch.aminmax(groups, dim=-1) if groups.numel() else (groups.new_zeros(groups.shape[:2]),) * 2
    scales = (largest / 15 - least / 15).to(weight.dtype)
    zeros = (least + 8 * scales.float()).to(weight.dtype)
    step = torch.where(scales > 0, scales.float(), 1.0)
    q = (groups - zeros.float()[..., None]).div_(step[..., None]).round_().add_(8).clamp_(0, 15)
    low, high = q.to(torch.uint8).view(n, k // 2, 2).unbind(-1)
    return low | high << 4, scales, zeros


# The references: float32 arithmetic determines the integers bit for bit, so they are computed in float32 too, in plain
# torch. Non-finite rows are handled afterwards.
def reference_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    finite = weight.isfinite().all(1)
    q, scales = peer_int8(weight.contiguous().where(finite[:, None], 0))
    return q, scales.where(finite, torch.nan)


def reference_int4(weight: Tensor, group_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    finite = weight.isfinite().unflatten(1, (weight.shape[1] // group_size, group_size)).all(-1)
    elements = finite.repeat_interleave(group_size, 1)
    q, scales, zeros = peer_int4(weight.contiguous().where(elements, 0), group_size)
    packed = q.where(elements[:, ::2], 0)
    return packed, scales.where(finite, torch.nan), zeros.where(finite, torch.nan)


def weights(dtype: torch.dtype, n: int, k: int) -> Tensor:
    g = torch.Generator().manual_seed(n * k)
    return (torch.randn(n, k, generator=g) / 16 + 0.01).to(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Make rows of 128: ends of the range, denormal scales, scales of 0, all equal, ties, and non-finite values."""
    steps, info = torch.linspace(-1, 1, 128), torch.finfo(dtype)
    rows = [(steps * size) for size in (info.max / 8, info.tiny, info.tiny / 16, info.smallest_normal * 20)]
    rows += [torch.full((128,), value) for value in (0.7109375, -3.0, 0.0, -0.0, info.max, torch.inf, torch.nan)]
    rows += [steps.where(torch.arange(128) != place, value) for place, value in ((0, torch.nan), (127, -torch.inf))]
    # Ties between two integers, of either sign.
    rows += [torch.arange(-127, 129).clamp(max=127)[::2] / 2, torch.arange(128) % 31 / 2]
    return torch.stack(rows).to(dtype)


def samples_int8(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k in ((3, 1), (5, 7), (4, 333), (2, 2049)):
        yield Sample(f"{n}x{k}", (weights(dtype, n, k),))
    yield Sample("edges", (edges(dtype),))
    yield Sample("no rows", (weights(dtype, 0, 5),))
    yield Sample("no columns", (weights(dtype, 5, 0),))
    yield Sample("large", (weights(dtype, 1021, 1024),))


def samples_int4(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k, group in ((3, 32, 32), (2, 2080, 32), (5, 192, 64), (3, 64 * 37, 64), (3, 128 * 19, 128)):
        yield Sample(f"{n}x{k}, groups of {group}", (weights(dtype, n, k), group))
    for group in (32, 64, 128):
        yield Sample(f"edges, groups of {group}", (edges(dtype), group))
    yield Sample("no rows", (weights(dtype, 0, 128),))
    yield Sample("no columns", (weights(dtype, 5, 0),))
    yield Sample("large", (weights(dtype, 1021, 1024),))


def weight_errors(op: str) -> Iterator[ErrorCase]:
    weight = weights(torch.float32, 4, 64)
    yield ErrorCase("rank", (weight[0],), op + "weight must have 2 dimensions, got 1 (shape [64])")
    yield ErrorCase("integers", (weight.long(),), op + "weight must be float32, bfloat16 or float16, got int64")
    yield ErrorCase(
        "transposed",
        (weight.t(),),
        op + "weight must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 64]",
    )


def errors_int8() -> Iterator[ErrorCase]:
    op = "infini::quantize_int8: "
    yield from weight_errors(op)
    weight = weights(torch.float32, 4, 64)
    q, scales = fake_int8(weight)
    for name, message, out0, out1 in (
        ("q shape", "out0 must have shape [4, 64] to match weight, got [4, 63]", q[:, :63], scales),
        ("q dtype", "out0 must be int8, got uint8", q.view(torch.uint8), scales),
        ("scales shape", "out1 must have shape [4] to match the rows of weight, got [3]", q, scales[:3]),
        ("scales dtype", "out1 must be float32, got float16", q, scales.half()),
        (
            "scales overlap",
            "out1 must share no memory with weight, got one whose span of memory overlaps it",
            q,
            weight.flatten()[:4],
        ),
    ):
        yield ErrorCase(name, (weight,), op + message, {"out0": out0, "out1": out1})


def errors_int4() -> Iterator[ErrorCase]:
    op = "infini::quantize_int4: "
    yield from weight_errors(op)
    weight = weights(torch.bfloat16, 4, 64)
    yield ErrorCase("group size", (weight, 16), op + "group_size must be 32, 64 or 128, got 16")
    yield ErrorCase(
        "columns", (weight, 128), op + "weight must have rows that are a multiple of group_size, 128, got 64"
    )
    q, scales, zeros = fake_int4(weight)
    for name, message, outs in (
        (
            "packed shape",
            "out0 must have shape [4, 32] for two columns of weight in a byte, got [4, 64]",
            (weight.byte(), scales, zeros),
        ),
        ("packed dtype", "out0 must be uint8, got int8", (q.view(torch.int8), scales, zeros)),
        ("scales dtype", "out1 must have the dtype of weight, bfloat16, got float32", (q, scales.float(), zeros)),
        (
            "zeros shape",
            "out2 must have shape [4, 1] to match the groups of weight, got [3, 1]",
            (q, scales, zeros[:3]),
        ),
        (
            "zeros overlap",
            "out2 must share no memory with out1, got one whose span of memory overlaps it",
            (q, scales, scales),
        ),
    ):
        outputs = dict(zip(("out0", "out1", "out2"), outs, strict=True))
        yield ErrorCase(name, (weight,), op + message, outputs)


def cost_int8(weight: Tensor) -> Cost:
    return Cost(bytes=nbytes(weight) + weight.numel() + 4 * weight.shape[0], flops=3 * weight.numel())


def cost_int4(weight: Tensor, group_size: int = 64) -> Cost:
    groups = 2 * weight.element_size() * (weight.numel() // group_size)
    return Cost(bytes=nbytes(weight) + weight.numel() // 2 + groups, flops=5 * weight.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k in ((256, 2048), (2048, 5632)):  # a weight's part that the cache holds, and a whole weight
        yield Sample(f"{n}x{k}", (weights(dtype, n, k),))


EXACT = dict.fromkeys(FLOATS, (0.0, 0.0))


INFOS = (
    OpInfo(
        **vars(REGISTRY["quantize_int8"]),
        reference=reference_int8,
        samples=samples_int8,
        errors=errors_int8,
        cost=cost_int8,
        bench=bench,
        peer=peer_int8,
        tolerances=EXACT,
    ),
    OpInfo(
        **vars(REGISTRY["quantize_int4"]),
        reference=reference_int4,
        samples=samples_int4,
        errors=errors_int4,
        cost=cost_int4,
        bench=bench,
        peer=peer_int4,
        tolerances=EXACT,
    ),
)
