"""Topksoftmax and Topkrouter of the C ABI, described for tests, fuzzer and benchmarks.

Inputs come from generators with fixed seeds: which of two scores that differ by a float's rounding comes first is not
determined by the reference in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def scores(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def outputs(rows: int, topk: int) -> dict[str, Tensor]:
    return {"values": torch.full((rows, topk), 77.0), "indices": torch.full((rows, topk), 77, dtype=torch.int32)}


def largest(x: Tensor, topk: int) -> Tensor:
    """Indices of the largest, largest first; of equals the lower index first; NaN before all."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :topk]


def softmax_reference(values: Tensor, indices: Tensor, x: Tensor, topk: int, norm: int) -> dict[str, Tensor]:
    chosen = largest(x.double(), topk)
    probabilities = torch.softmax(x.double(), -1).gather(-1, chosen)
    if norm:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return {"values": probabilities, "indices": chosen}


def softmax_samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]

        def sample(name: str, x: Tensor, topk: int, norm: int = 1, kind: str = kind) -> CSample:
            return CSample(f"{kind} {name}", {**outputs(x.shape[0], topk), "x": x, "topk": topk, "norm": norm})

        for norm in (0, 1, -3):
            for rows, width, topk in ((5, 128, 8), (3, 7, 7), (1, 1, 1), (2, 1025, 40), (33, 64, 1), (3, 513, 513)):
                yield sample(f"{rows} of {width}, {topk}, norm {norm}", scores(rows, width, dtype), topk, norm)
        yield sample("no rows", scores(0, 8, dtype), 3)
        yield sample("rows apart", scores(6, 200, dtype)[::2, 3:163], 9)
        yield sample("rows from the last to the first", scores(6, 64, dtype)[:1].expand(6, 64), 5, 0)
        yield sample("equals", torch.zeros(4, 70, dtype=dtype), 12)
        yield sample("a few values", scores(9, 300, dtype).clamp(-1, 1).round(), 250, 0)
        x = scores(4, 40, dtype)
        x[0, ::2] = -torch.inf
        x[1, 3::4] = torch.nan
        x[2, 5] = torch.inf
        x[3] = -torch.inf
        yield sample("infinities and NaN", x, 25, 0)
        zeros = torch.zeros(2, 20, dtype=dtype)
        zeros[:, ::3] = -0.0
        yield sample("negative zeros", zeros, 10)
        x = scores(2, 90, dtype)
        x[0] *= 1e3  # most exponentials vanish
        yield sample("far apart", x, 90)
        yield sample("large", scores(300, 128, dtype), 8)


def softmax_errors() -> Iterator[CErrorCase]:
    op = "infini::topksoftmax: "
    args = {**outputs(4, 3), "x": scores(4, 8, torch.float32), "topk": 3, "norm": 1}
    for topk in (0, 9, 2**64 - 1):
        yield CErrorCase(
            f"topk {topk}",
            {**args, "topk": topk},
            "BAD_PARAM",
            op + f"topk must be at least 1 and at most the 8 columns of x, got {topk}",
            at="run",
        )
    yield CErrorCase(
        "no columns",
        {**args, "x": torch.ones(4, 0)},
        "BAD_PARAM",
        op + "topk must be at least 1 and at most the 0 columns of x, got 3",
        at="run",
    )
    yield CErrorCase(
        "three dimensions",
        {**args, "x": torch.ones(2, 2, 8)},
        "BAD_TENSOR_SHAPE",
        op + "x must have 2 dimensions, got 3 (shape [2, 2, 8])",
    )
    yield CErrorCase(
        "integers",
        {**args, "x": torch.ones(4, 8, dtype=torch.int32)},
        "BAD_TENSOR_DTYPE",
        op + "x must be float32, bfloat16 or float16, got int32",
    )
    yield CErrorCase(
        "strided columns",
        {**args, "x": torch.ones(8, 4).T},
        "BAD_TENSOR_STRIDES",
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
    )
    yield CErrorCase(
        "overlap",
        {**args, "values": args["x"]},
        "BAD_PARAM",
        op + "values must share no memory with x, got one whose span of memory overlaps it",
        at="run",
    )
    yield CErrorCase(
        "outputs overlap",
        {**args, "indices": args["values"]},
        "BAD_PARAM",
        op + "indices must share no memory with values, got one whose span of memory overlaps it",
        at="run",
    )


def router_reference(
    values: Tensor, indices: Tensor, x: Tensor, correction_bias: Tensor, routed_scaling_factor: float, topk: int
) -> dict[str, Tensor]:
    s = torch.sigmoid(x.double())
    c = (s + correction_bias.double()).view(-1, 8, 32)
    group_scores = c.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros(c.shape[:2], dtype=torch.bool).scatter(-1, largest(group_scores, 4), True)
    c = torch.where(kept.unsqueeze(-1), c, 0).view(-1, 256)
    chosen = largest(c, topk)
    weights = s.gather(-1, chosen)
    return {"values": weights * routed_scaling_factor / (weights.sum(-1, keepdim=True) + 1e-9), "indices": chosen}


def router_samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]

        def sample(
            name: str, x: Tensor, bias: Tensor | None = None, topk: int = 8, scale: float = 2.5, kind: str = kind
        ) -> CSample:
            if bias is None:
                bias = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 0.1
            parameters = {"correction_bias": bias, "routed_scaling_factor": scale, "topk": topk}
            return CSample(f"{kind} {name}", {**outputs(x.shape[0], topk), "x": x, **parameters})

        for topk in (1, 8, 33, 128):
            yield sample(f"{topk} experts", scores(5, 256, dtype), topk=topk)
        yield sample("no rows", scores(0, 256, dtype))
        yield sample("rows apart", scores(12, 300, dtype)[::3, 7:263])
        yield sample("a broadcast row", scores(1, 256, dtype).expand(3, 256))
        yield sample("equals", torch.zeros(3, 256, dtype=dtype), torch.zeros(256))
        yield sample("experts of masked groups", scores(3, 256, dtype), topk=256)
        yield sample("negative scores", scores(3, 256, dtype), torch.full((256,), -2.0), topk=8, scale=1.0)
        bias = torch.randn(512, generator=torch.Generator().manual_seed(2))
        yield sample("a strided bias", scores(3, 256, dtype), bias[::2])
        x = scores(3, 256, dtype)
        x[0, 100] = torch.nan
        x[1, ::2] = torch.inf
        x[2] = -torch.inf
        yield sample("infinities and NaN", x, torch.zeros(256), topk=20)
        yield sample("all NaN", torch.full((2, 256), torch.nan, dtype=dtype), topk=256)
        yield sample("large", scores(200, 256, dtype))


def router_errors() -> Iterator[CErrorCase]:
    op = "infini::topkrouter: "
    parameters = {"correction_bias": torch.ones(256), "routed_scaling_factor": 2.5, "topk": 8}
    args = {**outputs(4, 8), "x": scores(4, 256, torch.float32), **parameters}
    for topk in (0, 257):
        yield CErrorCase(
            f"topk {topk}",
            {**args, "topk": topk},
            "BAD_PARAM",
            op + f"topk must be at least 1 and at most the 256 columns of x, got {topk}",
            at="run",
        )
    yield CErrorCase(
        "128 experts",
        {**args, "x": torch.ones(4, 128)},
        "BAD_TENSOR_SHAPE",
        op + "x must have shape [4, 256] for 256 experts, got [4, 128]",
    )
    yield CErrorCase(
        "short bias",
        {**args, "correction_bias": torch.ones(255)},
        "BAD_TENSOR_SHAPE",
        op + "correction_bias must have shape [256] for 256 experts, got [255]",
    )
    yield CErrorCase(
        "half bias",
        {**args, "correction_bias": torch.ones(256, dtype=torch.float16)},
        "BAD_TENSOR_DTYPE",
        op + "correction_bias must be float32, got float16",
    )
    yield CErrorCase(
        "strided columns",
        {**args, "x": torch.ones(256, 4).T},
        "BAD_TENSOR_STRIDES",
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
    )
    yield CErrorCase(
        "overlap",
        {**args, "indices": args["correction_bias"]},
        "BAD_PARAM",
        op + "indices must share no memory with correction_bias, got one whose span of memory overlaps it",
        at="run",
    )


def result_bytes(args: Mapping[str, Any]) -> dict[str, int]:
    """What values and indices need, for they have no descriptor; nothing where topk will be refused."""
    rows, width = args["x"].shape
    size = 4 * rows * args["topk"] if 0 < args["topk"] <= width else 0
    return {"values": size, "indices": size}


C_OPS = [
    COp(
        "Topksoftmax",
        ["values", "indices"],
        softmax_reference,
        softmax_samples,
        softmax_errors,
        undescribed=result_bytes,
    ),
    COp("Topkrouter", ["values", "indices"], router_reference, router_samples, router_errors, undescribed=result_bytes),
]
