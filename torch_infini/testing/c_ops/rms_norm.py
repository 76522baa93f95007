"""RMSNorm and AddRMSNorm of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import CErrorCase, COp, CSample

PAIRS = (  # activations, weight
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    *((x, w) for x in (torch.float16, torch.bfloat16) for w in (torch.float16, torch.bfloat16, torch.float32)),
)


def normed(h: Tensor, w: Tensor, epsilon: float) -> Tensor:
    h = h.double()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon) * w.double()


def reference(y: Tensor, x: Tensor, w: Tensor, epsilon: float) -> dict[str, Tensor]:
    return {"y": normed(x, w, epsilon)}


def add_reference(
    y: Tensor, a: Tensor, b: Tensor, weight: Tensor, epsilon: float, residual_out: Tensor
) -> dict[str, Tensor]:
    h = (a.double() + b.double()).to(a.dtype)
    return {"residual_out": a.double() + b.double(), "y": normed(h, weight, epsilon)}


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype) -> dict[str, Any]:
    return {
        "y": filled(shape, dtype),
        "x": torch.randn(shape).to(dtype),
        "w": torch.randn(shape[-1]).to(weight),
        "epsilon": 1e-5,
    }


def samples() -> Iterator[CSample]:
    for dtype, weight in PAIRS:
        kind = f"{str(dtype)[6:]} by {str(weight)[6:]}"
        for shape in ((1, 1), (4, 512), (2, 3, 769), (0, 8), (300, 2048)):
            yield CSample(f"{kind} {shape}", tensors(shape, dtype, weight))
        args = tensors((3, 5, 40), dtype, weight)
        args["x"] = args["x"].transpose(0, 1).contiguous().transpose(0, 1)
        args["y"] = filled((3, 5, 64), dtype)[..., 7:47]
        yield CSample(f"{kind} strided rows", args)
        args = tensors((4, 40), dtype, weight)
        args["x"] = args["x"][:1].expand(4, 40)
        yield CSample(f"{kind} broadcast", args)
        args = tensors((7, 96), dtype, weight)
        args["y"] = args["x"]
        yield CSample(f"{kind} in place", args)


def add_tensors(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype) -> dict[str, Any]:
    args = tensors(shape, dtype, weight)
    return {
        "y": args["y"],
        "a": args["x"],
        "b": torch.randn(shape).to(dtype),
        "weight": args["w"],
        "epsilon": 1e-5,
        "residual_out": filled(shape, dtype),
    }


def add_samples() -> Iterator[CSample]:
    for dtype, weight in PAIRS:
        kind = f"{str(dtype)[6:]} by {str(weight)[6:]}"
        for shape in ((1, 1), (4, 512), (2, 3, 769), (0, 8), (300, 2048)):
            yield CSample(f"{kind} {shape}", add_tensors(shape, dtype, weight))
        args = add_tensors((7, 96), dtype, weight)
        args["residual_out"] = args["b"]
        args["y"] = args["a"]
        yield CSample(f"{kind} in place", args)


def errors() -> Iterator[CErrorCase]:
    args = tensors((4, 8), torch.float32, torch.float32)
    op = "infini::rms_norm: "
    yield CErrorCase(
        "short weight",
        {**args, "w": torch.ones(7)},
        "BAD_TENSOR_SHAPE",
        op + "weight must have shape [8] to match the last dimension of x, got [7]",
    )
    yield CErrorCase(
        "integers",
        {**args, "x": torch.ones(4, 8, dtype=torch.int32)},
        "BAD_TENSOR_DTYPE",
        op + "x must be float32, bfloat16, float16 or float64, got int32",
    )
    yield CErrorCase(
        "half weight",
        {**args, "w": torch.ones(8, dtype=torch.float16)},
        "BAD_TENSOR_DTYPE",
        op + "weight must be float32 as x is, got float16",
    )
    yield CErrorCase(
        "other output dtype",
        {**args, "y": torch.ones(4, 8, dtype=torch.float16)},
        "BAD_TENSOR_DTYPE",
        op + "out must be float32, got float16",
    )
    yield CErrorCase(
        "strided columns",
        {**args, "x": torch.ones(8, 4).T},
        "BAD_TENSOR_STRIDES",
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 4]",
    )
    yield CErrorCase(
        "broadcast output",
        {**args, "y": torch.ones(1, 8).expand(4, 8)},
        "BAD_TENSOR_STRIDES",
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
    )
    yield CErrorCase(
        "epsilon",
        {**args, "epsilon": float("nan")},
        "BAD_PARAM",
        op + "eps must be a finite number of at least 0, got nan",
    )
    buffer = torch.ones(5, 8)
    yield CErrorCase(
        "overlap",
        {**args, "x": buffer[:4], "y": buffer[1:]},
        "BAD_PARAM",
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


def add_errors() -> Iterator[CErrorCase]:
    args = add_tensors((4, 8), torch.float32, torch.float32)
    op = "infini::add_rms_norm: "
    yield CErrorCase(
        "no residual_out",
        {**args, "residual_out": None},
        "BAD_PARAM",
        "infiniopCreateAddRMSNormDescriptor: residual_out_desc must not be NULL",
    )
    yield CErrorCase(
        "shapes differ",
        {**args, "b": torch.ones(4, 9)},
        "BAD_TENSOR_SHAPE",
        op + "residual must have the shape of x, [4, 8], got [4, 9]",
    )


OPS = [
    COp("RMSNorm", ["y"], reference, samples, errors),
    COp("AddRMSNorm", ["y", "residual_out"], add_reference, add_samples, add_errors),
]
