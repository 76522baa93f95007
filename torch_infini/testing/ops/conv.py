"""conv: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.conv import SPEC, Ints, fake, numbers
from ...ops.matmul import values
from ..c_door import all_but, c_op
from ..c_ops import CErrorCase, Described
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes

FUNCTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1
) -> Tensor:
    bias = None if bias is None else bias.double()
    if weight.shape[1] == 0:  # torch's result then loses its channels
        y = torch.zeros(fake(x, weight, bias, stride, padding, dilation).shape, dtype=torch.float64)
        return y if bias is None else y + bias.view(-1, *[1] * (weight.dim() - 2))
    return FUNCTIONS[weight.dim() - 2](x.double(), weight.double(), bias, stride, padding, dilation)


def peer(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1
) -> Tensor:
    return FUNCTIONS[weight.dim() - 2](x, weight, bias, stride, padding, dilation)


def inputs(
    dtype: torch.dtype, x: tuple[int, ...], weight: tuple[int, ...], bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make (x, weight, bias) such that results have a spread of 1."""
    depth = max(torch.Size(weight[1:]).numel(), 1)
    scaled = values(dtype, *weight, seed=1, scale=depth**-0.5)
    return values(dtype, *x), scaled, values(dtype, weight[0], seed=2) if bias else None


CASES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ("2-D", (2, 3, 17, 19), (8, 3, 3, 3), {}),
    ("padding", (2, 3, 17, 19), (8, 3, 3, 3), {"padding": [1, 1]}),
    ("1-D", (2, 3, 50), (4, 3, 5), {"stride": [3], "padding": [2]}),
    ("strides and dilations", (2, 5, 20, 23), (7, 5, 3, 4), {"stride": [2, 3], "padding": (2, 3), "dilation": [3, 2]}),
    ("3-D", (1, 2, 7, 8, 9), (4, 2, 3, 2, 3), {"stride": [2, 1, 2], "padding": [1, 0, 2]}),
    ("one image", (3, 12, 9), (5, 3, 3, 3), {"padding": 1, "stride": 2}),
    ("one image, 1-D", (3, 30), (5, 3, 3), {}),
    ("padding beyond the kernel", (1, 2, 4, 3), (3, 2, 2, 2), {"padding": [5, 6]}),
    ("patches", (1, 3, 56, 56), (32, 3, 14, 14), {"stride": 14}),
    ("1 x 1", (2, 16, 10, 10), (8, 16, 1, 1), {}),
    ("one element", (1, 1, 1), (1, 1, 1), {}),
    ("several tiles", (1, 32, 40, 40), (16, 32, 3, 3), {"padding": 1}),
    ("no images", (0, 3, 8), (2, 3, 3), {}),
    ("no input channels", (2, 0, 8), (2, 0, 3), {}),
)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, of_x, of_weight, parameters in CASES:
        yield Sample(name, inputs(dtype, of_x, of_weight), parameters)
    yield Sample("without bias", inputs(dtype, (1, 4, 9, 7), (5, 4, 3, 2), bias=False))
    x, weight, bias = inputs(dtype, (2, 3, 17, 19), (8, 3, 3, 3))
    last = torch.channels_last
    yield Sample("channels last", (x.to(memory_format=last), weight.to(memory_format=last), bias), {"padding": 1})
    yield Sample("transposed", (x.transpose(2, 3), weight.transpose(2, 3), bias))
    yield Sample("expanded", (x[:1].expand(3, 3, 17, 19), weight[:1].expand(8, 3, 3, 3), bias))
    x = x.clone()
    x[0, 1, 4, 5], x[1, 2, 0, 0] = torch.nan, torch.inf
    yield Sample("NaN and infinity", (x, weight, bias), {"padding": 1})


def errors() -> Iterator[ErrorCase]:
    x, weight, bias = inputs(torch.float32, (2, 3, 8, 9), (4, 3, 3, 3))
    op = "infini::conv: "
    yield ErrorCase(
        "no spatial dimensions", (x, weight[0, :2, 0]), op + "weight must have 3 to 8 dimensions, got 2 (shape [2, 3])"
    )
    yield ErrorCase("rank", (x[0, 0], weight), op + "x must have 4 dimensions, got 2 (shape [8, 9])")
    yield ErrorCase("float64", (x.double(), weight), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("weight dtype", (x, weight.half()), op + "weight must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "input channels",
        (x, weight[:, :2]),
        op + "weight must have 3 input channels, as x has, got 2 (shape [4, 2, 3, 3])",
    )
    yield ErrorCase(
        "kernel too large",
        (x, torch.zeros(4, 3, 11, 3), None, 1, 1),
        op + "weight must not be larger than the padded x, got shape [4, 3, 11, 3] for x [2, 3, 8, 9]",
    )
    yield ErrorCase(
        "bias shape",
        (x, weight, torch.ones(5)),
        op + "bias must have shape [4] to match the output channels of weight, got [5]",
    )
    assert bias is not None
    yield ErrorCase("bias dtype", (x, weight, bias.half()), op + "bias must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "stride 0", (x, weight, bias, [1, 0]), op + "stride must be 1 to 2^31 - 1, got 0 for spatial dimension 1"
    )
    yield ErrorCase(
        "negative padding",
        (x, weight, bias, 1, -1),
        op + "padding must be 0 to 2^31 - 1, got -1 for spatial dimension 0",
    )
    yield ErrorCase(
        "three strides",
        (x, weight, bias, [1, 1, 1]),
        op + "stride must have 1 or 2 values, for the spatial dimensions, got 3",
    )
    yield ErrorCase(
        "no dilation",
        (x, weight, bias, 1, 0, []),
        op + "dilation must have 1 or 2 values, for the spatial dimensions, got 0",
    )
    yield ErrorCase(
        "out shape",
        (x, weight, bias),
        op + "out must have shape [2, 4, 6, 7], as x, weight and the parameters give it, got [2, 4, 8, 9]",
        {"out": torch.empty(2, 4, 8, 9)},
    )
    yield ErrorCase(
        "out of one image",
        (x[0], weight, bias),
        op + "out must have 3 dimensions, got 4 (shape [1, 4, 6, 7])",
        {"out": torch.empty(1, 4, 6, 7)},
    )
    yield ErrorCase(
        "out dtype",
        (x, weight, bias),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 4, 6, 7).half()},
    )
    yield ErrorCase(
        "broadcast out",
        (x, weight, bias),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 42, 7, 1]",
        {"out": torch.empty(4, 6, 7).expand(2, 4, 6, 7)},
    )
    square = inputs(torch.float32, (2, 3, 8, 8), (3, 3, 1, 1))
    yield ErrorCase(
        "out is x",
        square,
        op + "out must share no memory with x, got one whose span of memory overlaps it",
        {"out": square[0]},
    )


def cost(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1
) -> Cost:
    out = fake(x.to("meta"), weight, bias, stride, padding, dilation)
    return Cost(bytes=nbytes(x, weight, bias, out), flops=2 * out.numel() * weight.shape[1:].numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("patches 1x3x336x336, 1024x14x14", inputs(dtype, (1, 3, 336, 336), (1024, 3, 14, 14)), {"stride": 14})
    yield Sample("1x64x56x56, 64x3x3", inputs(dtype, (1, 64, 56, 56), (64, 64, 3, 3)), {"padding": 1})
    yield Sample("audio 1x80x3000, 384x3", inputs(dtype, (1, 80, 3000), (384, 80, 3)), {"padding": 1})


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={
        torch.float32: (1e-6, 2e-6),
        torch.bfloat16: (2**-8, 3e-6),
        torch.float16: (2**-11, 3e-6),
    },
)


C_NAMES = {"padding": "pads", "stride": "strides", "dilation": "dilations"}


def to_c(args: dict[str, Any]) -> dict[str, Any] | None:
    """Batch the images; parameters get a value per spatial dimension, NULL if they are not given."""
    n, usual = args["weight"].dim() - 2, {"padding": 0, "stride": 1, "dilation": 1}
    if args["x"].dim() == n + 1:
        return None
    numbers_of = {c: None if args[name] == usual[name] else numbers(args[name], n) for name, c in C_NAMES.items()}
    return {"x": args["x"], "w": args["weight"], "bias": args["bias"], "n": n, **numbers_of}


def to_torch(args: dict[str, Any]) -> dict[str, Any]:
    usual = {"padding": 0, "stride": 1, "dilation": 1}
    given = {name: usual[name] if args[c] is None else args[c] for name, c in C_NAMES.items()}
    return {"x": args["x"], "weight": args["w"], "bias": args["bias"], **given}


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    x, w, y = (args[name] for name in "xwy")

    def order(t: Tensor, *dims: int) -> Tensor:
        """Copy the values with their dimensions in this order in memory."""
        return t.permute(dims).contiguous().permute(torch.tensor(dims).argsort().tolist())

    yield "channels and columns of x swapped", {**args, "x": order(x, 3, 1, 0, 2)}
    yield "channels last", args | {name: order(args[name], 0, 2, 3, 1) for name in "xwy"}
    yield "images and channels of w and y swapped", {**args, "w": order(w, 1, 0, 2, 3), "y": order(y, 1, 0, 2, 3)}
    steps = (*x.stride()[:2], -x.shape[3], -1)
    yield "negative strides", {**args, "x": Described(x, tuple(x.shape), steps, x.shape[2] * x.shape[3] - 1)}


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    call = inputs(dtype, (2, 3, 17, 19), (8, 3, 3, 3))
    yield Sample("2-D", call, {"padding": [1, 1]})
    yield Sample("strides", call, {"padding": [1, 1], "stride": [2, 1]})


def c_errors() -> Iterator[CErrorCase]:
    x, weight, bias = inputs(torch.float32, (2, 3, 8, 9), (4, 3, 3, 3))
    args = {"y": torch.ones(2, 4, 6, 7), "x": x, "w": weight, "bias": bias, **dict.fromkeys(C_NAMES.values())}
    for n in (0, 7):
        yield CErrorCase(
            f"{n} spatial dimensions",
            {**args, "n": n},
            "BAD_PARAM",
            f"infiniopCreateConvDescriptor: n must be 1 to 6, the spatial dimensions, got {n}",
        )
    rank = "infini::conv: x must have 3 dimensions, got 4 (shape [2, 3, 8, 9])"
    yield CErrorCase("one spatial dimension", {**args, "n": 1}, "BAD_TENSOR_SHAPE", rank)


C_OPS = [
    c_op(
        INFO,
        "Conv",
        ["y"],
        errors=c_errors,
        to_c=to_c,
        to_torch=to_torch,
        refuses=all_but("no spatial dimensions", "three strides", "no dilation"),
        variants=c_layouts,
        varied=c_varied,
    )
]
