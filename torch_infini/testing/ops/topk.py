"""topksoftmax and topkrouter: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops import FLOATS, REGISTRY
from ..c_door import Arguments, c_op, unwritten
from ..c_ops import CErrorCase, CSample
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes

# The sizes of DeepSeek-V3, which topkrouter is made for.
EXPERTS, GROUPS, KEPT_GROUPS = 256, 8, 4


def largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest, largest first; among equal ones the lower index first; NaN before all."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]


def softmax_reference(x: Tensor, k: int = 8, normalize: bool = False) -> tuple[Tensor, Tensor]:
    chosen = largest(x.double(), k)
    values = torch.softmax(x.double(), -1).gather(-1, chosen)
    return values / values.sum(-1, keepdim=True) if normalize else values, chosen


def kept_groups(c: Tensor, groups: Tensor) -> Tensor:
    """Return c [tokens, 8, 32], flat, with 0 in all groups except the given ones."""
    mask = torch.zeros(c.shape[:2], dtype=torch.bool).scatter(-1, groups, True)
    return torch.where(mask.unsqueeze(-1), c, 0).flatten(1)


def router_reference(
    x: Tensor, correction_bias: Tensor, k: int = 8, routed_scaling_factor: float = 2.5
) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x.double())
    c = (s + correction_bias.double()).view(-1, GROUPS, EXPERTS // GROUPS)
    groups = largest(c.topk(2, dim=-1).values.sum(-1), KEPT_GROUPS)
    chosen = largest(kept_groups(c, groups), k)
    values = s.gather(-1, chosen)
    return values * routed_scaling_factor / (values.sum(-1, keepdim=True) + 1e-9), chosen


def softmax_peer(x: Tensor, k: int = 8, normalize: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = torch.softmax(x, -1, dtype=torch.float32).topk(k, -1)
    return values / values.sum(-1, keepdim=True) if normalize else values, indices.int()


def router_peer(
    x: Tensor, correction_bias: Tensor, k: int = 8, routed_scaling_factor: float = 2.5
) -> tuple[Tensor, Tensor]:
    s = x.float().sigmoid()
    c = (s + correction_bias).view(-1, GROUPS, EXPERTS // GROUPS)
    groups = c.topk(2, dim=-1).values.sum(-1).topk(KEPT_GROUPS, -1, sorted=False).indices
    indices = kept_groups(c, groups).topk(k, -1).indices
    values = s.gather(-1, indices)
    return values * routed_scaling_factor / (values.sum(-1, keepdim=True) + 1e-9), indices.int()


def scores(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make a router's logits. Fixed, because the reference cannot order two that differ by a rounding error."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def softmax_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("8 of 128", (scores(dtype, 5, 128),))
    for rows, width, k in ((3, 7, 7), (1, 1, 1), (2, 1025, 40), (33, 64, 1), (3, 513, 513)):
        for normalize in (False, True):
            yield Sample(f"{k} of {width}, {normalize}", (scores(dtype, rows, width), k, normalize))
    yield Sample("no rows", (scores(dtype, 0, 8), 3))
    yield Sample("rows apart", (scores(dtype, 6, 200)[::2, 3:163], 9))
    yield Sample("a broadcast row", (scores(dtype, 1, 64).expand(6, 64), 5))
    yield Sample("equals", (torch.zeros(4, 70, dtype=dtype), 12))
    yield Sample("a few values", (scores(dtype, 9, 300).clamp(-1, 1).round(), 250))
    x = scores(dtype, 4, 40)
    x[0, ::2] = -torch.inf
    x[1, 3::4] = torch.nan
    x[2, 5] = torch.inf
    x[3] = -torch.inf
    yield Sample("infinities and NaN", (x, 25))
    zeros = torch.zeros(2, 20, dtype=dtype)
    zeros[:, ::3] = -0.0
    yield Sample("negative zeros", (zeros, 10))
    x = scores(dtype, 2, 90)
    x[0] *= 1e3  # most exponentials vanish
    yield Sample("far apart", (x, 90))
    yield Sample("large", (scores(dtype, 1000, 128), 8, True))


def correction(seed: int = 1) -> Tensor:
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(seed)) * 0.1


def router_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("8 experts", (scores(dtype, 5, 256), correction()))
    for k in (1, 33, 128):
        yield Sample(f"{k} experts", (scores(dtype, 5, 256), correction(), k))
    yield Sample("another factor", (scores(dtype, 5, 256), correction(), 6, 16.0))
    yield Sample("no rows", (scores(dtype, 0, 256), correction()))
    yield Sample("rows apart", (scores(dtype, 12, 300)[::3, 7:263], correction()))
    yield Sample("a broadcast row", (scores(dtype, 1, 256).expand(3, 256), correction()))
    yield Sample("equals", (torch.zeros(3, 256, dtype=dtype), torch.zeros(256)))
    yield Sample("experts of masked groups", (scores(dtype, 3, 256), correction(), 256))
    yield Sample("negative scores", (scores(dtype, 3, 256), torch.full((256,), -2.0), 8, 1.0))
    bias = torch.randn(512, generator=torch.Generator().manual_seed(2))
    yield Sample("a strided bias", (scores(dtype, 3, 256), bias[::2]))
    x = scores(dtype, 3, 256)
    x[0, 100] = torch.nan
    x[1, ::2] = torch.inf
    x[2] = -torch.inf
    yield Sample("infinities and NaN", (x, torch.zeros(256), 20))
    yield Sample("all NaN", (torch.full((2, 256), torch.nan, dtype=dtype), torch.zeros(256), 256))
    yield Sample("large", (scores(dtype, 300, 256), correction()))


def output_errors(op: str, x: Tensor, args: tuple[Tensor, ...]) -> Iterator[ErrorCase]:
    """Yield the out forms that both ops reject: x has 4 rows, and args asks for 8 experts."""
    values, indices = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.int32)

    def case(name: str, message: str, out0: Tensor = values, out1: Tensor = indices) -> ErrorCase:
        return ErrorCase(name, args, op + message, {"out0": out0, "out1": out1})

    rule = "must have shape [4, 8] for the rows of x and as many chosen, got [4, 7]"
    yield case("values' shape", f"out0 {rule}", values[:, :7])
    yield case("indices' shape", f"out1 {rule}", out1=indices[:, :7])
    yield case("values' dtype", "out0 must be float32, got float16", values.half())
    yield case("indices' dtype", "out1 must be int32, got int64", out1=indices.long())
    yield case(
        "indices' strides",
        "out1 must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
        out1=torch.empty(8, 4, dtype=torch.int32).t(),
    )
    yield case(
        "values broadcast",
        "out0 must not be a broadcast view, for it is written to, got strides [0, 1]",
        values[:1].expand(4, 8),
    )
    yield case(
        "values overlap x", "out0 must share no memory with x, got one whose span of memory overlaps it", x[:, :8]
    )
    yield case(
        "outputs overlap",
        "out1 must share no memory with out0, got one whose span of memory overlaps it",
        out1=values.view(torch.int32),
    )


def softmax_errors() -> Iterator[ErrorCase]:
    op = "infini::topksoftmax: "
    x = scores(torch.float32, 4, 16)
    for k in (0, -1):
        yield ErrorCase(f"k {k}", (x, k), op + f"k must be at least 1, got {k}")
    for k in (17, 2**62):
        yield ErrorCase(f"k {k}", (x, k), op + f"k must be at least 1 and at most the 16 columns of x, got {k}")
    yield ErrorCase("no columns", (x[:, :0], 3), op + "k must be at least 1 and at most the 0 columns of x, got 3")
    yield ErrorCase("three dimensions", (x.view(2, 2, 16),), op + "x must have 2 dimensions, got 3 (shape [2, 2, 16])")
    yield ErrorCase("integers", (x.int(),), op + "x must be float32, bfloat16 or float16, got int32")
    yield ErrorCase(
        "transposed",
        (x.t(), 2),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 16]",
    )
    yield from output_errors(op, x, (x,))


def router_errors() -> Iterator[ErrorCase]:
    op = "infini::topkrouter: "
    x, bias = scores(torch.float32, 4, 256), correction()
    yield ErrorCase("k 0", (x, bias, 0), op + "k must be at least 1, got 0")
    yield ErrorCase("k 257", (x, bias, 257), op + "k must be at least 1 and at most the 256 columns of x, got 257")
    yield ErrorCase("integers", (x.int(), bias), op + "x must be float32, bfloat16 or float16, got int32")
    yield ErrorCase("three dimensions", (x[None], bias), op + "x must have 2 dimensions, got 3 (shape [1, 4, 256])")
    yield ErrorCase(
        "transposed",
        (x.t(), bias),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 256]",
    )
    yield ErrorCase("128 experts", (x[:, :128], bias), op + "x must have shape [4, 256] for 256 experts, got [4, 128]")
    yield ErrorCase(
        "short bias", (x, bias[:255]), op + "correction_bias must have shape [256] for 256 experts, got [255]"
    )
    yield ErrorCase("half bias", (x, bias.half()), op + "correction_bias must be float32, got float16")
    yield ErrorCase("meta bias", (x, bias.to("meta")), op + "correction_bias must be on the device of x, cpu, got meta")
    yield from output_errors(op, x, (x, bias))


def softmax_cost(x: Tensor, k: int = 8, normalize: bool = False) -> Cost:
    return Cost(bytes=nbytes(x) + 8 * x.shape[0] * k, flops=20 * x.numel())


def router_cost(x: Tensor, correction_bias: Tensor, k: int = 8, routed_scaling_factor: float = 2.5) -> Cost:
    return Cost(bytes=nbytes(x, correction_bias) + 8 * x.shape[0] * k, flops=25 * x.numel())


def softmax_bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x128, 8", (scores(dtype, 512, 128), 8, True))
    yield Sample("512x8, 2", (scores(dtype, 512, 8), 2, True))
    yield Sample("1x128, 8", (scores(dtype, 1, 128), 8, True))


def router_bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x256, 8", (scores(dtype, 512, 256), correction()))
    yield Sample("1x256, 8", (scores(dtype, 1, 256), correction()))


# The values are float32 for any dtype of x.
EXACT = dict.fromkeys(FLOATS, (2e-6, 2e-6))


INFOS = (
    OpInfo(
        **vars(REGISTRY["topksoftmax"]),
        reference=softmax_reference,
        samples=softmax_samples,
        errors=softmax_errors,
        cost=softmax_cost,
        bench=softmax_bench,
        peer=softmax_peer,
        tolerances=EXACT,
    ),
    OpInfo(
        **vars(REGISTRY["topkrouter"]),
        reference=router_reference,
        samples=router_samples,
        errors=router_errors,
        cost=router_cost,
        bench=router_bench,
        peer=router_peer,
        tolerances=EXACT,
    ),
)


def result_bytes(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of values and indices, which have no descriptor; empty if topk is invalid."""
    rows, width = args["x"].shape
    size = 4 * rows * args["topk"] if 0 < args["topk"] <= width else 0
    return {"values": size, "indices": size}


def refused_of_inputs(case: ErrorCase) -> bool:
    """Skip error cases of outputs, which have no descriptor, and of k, which has another name."""
    return "out0" not in case.kwargs and ": k must" not in case.message


def c_results(rows: int, topk: int) -> Arguments:
    return {"values": unwritten((rows, topk), torch.float32), "indices": unwritten((rows, topk), torch.int32)}


def c_refused(op: str, args: Arguments, other: str) -> Iterator[CErrorCase]:
    """Yield calls that the run of both ops rejects; `other`: an input that indices must not overlap."""
    width = args["x"].shape[1]
    for topk in (0, width + 1, 2**64 - 1):
        sentence = f"infini::{op}: topk must be at least 1 and at most the {width} columns of x, got {topk}"
        yield CErrorCase(f"topk {topk}", {**args, "topk": topk}, "BAD_PARAM", sentence, "run")
    for output, on in (("values", "x"), ("indices", other)):
        sentence = f"infini::{op}: {output} must share no memory with {on}, got one whose span of memory overlaps it"
        yield CErrorCase(f"{output} on {on}", {**args, output: args[on]}, "BAD_PARAM", sentence, "run")


def softmax_c_samples() -> Iterator[Sample | CSample]:
    x = scores(torch.float32, 5, 128)
    for norm in (-3, 1 << 30):
        args = {**c_results(5, 8), "x": x, "topk": 8, "norm": norm}
        yield CSample(f"norm {norm}", args, EXACT[torch.float32])


def softmax_c_errors() -> Iterator[CErrorCase]:
    args = {**c_results(4, 3), "x": scores(torch.float32, 4, 8), "topk": 3, "norm": 1}
    yield from c_refused("topksoftmax", args, "values")
    sentence = "infini::topksoftmax: topk must be at least 1 and at most the 0 columns of x, got 3"
    yield CErrorCase("no columns", {**args, "x": torch.ones(4, 0)}, "BAD_PARAM", sentence, "run")


def router_c_errors() -> Iterator[CErrorCase]:
    x = scores(torch.float32, 4, 256)
    args = {**c_results(4, 8), "x": x, "correction_bias": correction(), "routed_scaling_factor": 2.5, "topk": 8}
    yield from c_refused("topkrouter", args, "correction_bias")


C_OPS = [
    c_op(
        INFOS[0],
        "Topksoftmax",
        ["values", "indices"],
        {"k": "topk", "normalize": "norm"},
        samples=softmax_c_samples,
        errors=softmax_c_errors,
        refuses=refused_of_inputs,
        reversible=("x",),
        undescribed=result_bytes,
    ),
    c_op(
        INFOS[1],
        "Topkrouter",
        ["values", "indices"],
        {"k": "topk"},
        errors=router_c_errors,
        refuses=refused_of_inputs,
        reversible=("x",),
        undescribed=result_bytes,
    ),
]
