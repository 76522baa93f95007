"""Conv of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

Ints = Sequence[int] | None


def reference(
    y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, pads: Ints, strides: Ints, dilations: Ints, n: int
) -> dict[str, Tensor]:
    if x.shape[1] == 0:  # torch's result loses its channels there
        value = torch.zeros(y.shape, dtype=torch.float64)
        return {"y": value if bias is None else value + bias.double().view(-1, *[1] * n)}
    function = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[n]
    value = function(
        x.double(),
        w.double(),
        None if bias is None else bias.double(),
        padding=list(pads[:n]) if pads is not None else 0,
        stride=list(strides[:n]) if strides is not None else 1,
        dilation=list(dilations[:n]) if dilations is not None else 1,
    )
    return {"y": value}


def tensors(
    x: Sequence[int],
    w: Sequence[int],
    dtype: torch.dtype,
    pads: Ints = None,
    strides: Ints = None,
    dilations: Ints = None,
    bias: bool = True,
) -> dict[str, Any]:
    n = len(x) - 2
    args: dict[str, Any] = {
        "y": torch.empty(0),
        "x": torch.randn(*x).to(dtype),
        "w": (torch.randn(*w) / 4).to(dtype),
        "bias": torch.randn(w[0]).to(dtype) if bias else None,
        "pads": pads,
        "strides": strides,
        "dilations": dilations,
        "n": n,
    }
    p, s, d = pads or [0] * n, strides or [1] * n, dilations or [1] * n
    out = [(x[i + 2] + 2 * p[i] - d[i] * (w[i + 2] - 1) - 1) // s[i] + 1 for i in range(n)]
    args["y"] = torch.full((x[0], w[0], *out), 77, dtype=dtype)
    return args


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one element", {"x": (1, 1, 1), "w": (1, 1, 1)}),
    ("1-D", {"x": (2, 3, 50), "w": (4, 3, 5), "pads": [2], "strides": [3]}),
    ("2-D", {"x": (2, 3, 17, 19), "w": (8, 3, 3, 3), "pads": [1, 1]}),
    ("2-D without parameters", {"x": (1, 4, 9, 7), "w": (5, 4, 3, 2), "bias": False}),
    (
        "strides and dilations",
        {"x": (2, 5, 20, 23), "w": (7, 5, 3, 4), "pads": [2, 3], "strides": [2, 3], "dilations": [3, 2]},
    ),
    ("padding beyond the kernel", {"x": (1, 2, 4, 3), "w": (3, 2, 2, 2), "pads": [5, 6]}),
    ("patches", {"x": (1, 3, 56, 56), "w": (32, 3, 14, 14), "strides": [14, 14]}),
    ("3-D", {"x": (1, 2, 7, 8, 9), "w": (4, 2, 3, 2, 3), "pads": [1, 0, 2], "strides": [2, 1, 2]}),
    ("1 x 1", {"x": (2, 16, 10, 10), "w": (8, 16, 1, 1)}),
    ("several tiles", {"x": (1, 32, 40, 40), "w": (16, 32, 3, 3), "pads": [1, 1]}),
    ("no images", {"x": (0, 3, 8), "w": (2, 3, 3)}),
    ("no input channels", {"x": (2, 0, 8), "w": (2, 0, 3)}),
)  # fmt: skip


def samples() -> Iterator[CSample]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kind = str(dtype)[6:]
        # Sums of several hundred products around 1, which may cancel.
        tolerance = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2**-8, 1e-3), torch.float16: (2**-11, 1e-3)}[dtype]
        for name, case in CASES:
            yield CSample(f"{kind} {name}", tensors(**case, dtype=dtype), tolerance)
        args = tensors((2, 3, 17, 19), (8, 3, 3, 3), dtype, pads=[1, 1])
        args["x"] = args["x"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        yield CSample(f"{kind} channels and columns swapped", args, tolerance)
        args = tensors((2, 3, 17, 19), (8, 3, 3, 3), dtype, pads=[1, 1], strides=[2, 1])
        args["x"] = Described(args["x"], (2, 3, 17, 19), (969, 323, -19, -1), 322)
        yield CSample(f"{kind} negative strides", args, tolerance)
        args = tensors((2, 3, 17, 19), (8, 3, 3, 3), dtype, pads=[1, 1])
        args["w"] = args["w"].to(memory_format=torch.channels_last)
        args["y"] = args["y"].to(memory_format=torch.channels_last)
        yield CSample(f"{kind} channels last", args, tolerance)
        args = tensors((2, 3, 17, 19), (8, 3, 3, 3), dtype, pads=[1, 1])
        args["w"], args["y"] = args["w"].transpose(0, 1).contiguous().transpose(0, 1), torch.zeros_like(args["y"])
        args["y"] = args["y"].transpose(0, 1).contiguous().transpose(0, 1)
        yield CSample(f"{kind} images and channels swapped", args, tolerance)


def errors() -> Iterator[CErrorCase]:
    args = tensors((2, 3, 8, 9), (4, 3, 3, 3), torch.float32, pads=[1, 1])
    op = "infini::conv: "
    yield CErrorCase(
        "kernel too large",
        {**args, "w": torch.zeros(4, 3, 11, 3)},
        "BAD_TENSOR_SHAPE",
        op + "weight must not be larger than the padded x, got shape [4, 3, 11, 3] for x [2, 3, 8, 9]",
    )
    yield CErrorCase(
        "output shape",
        {**args, "y": torch.zeros(2, 4, 8, 8)},
        "BAD_TENSOR_SHAPE",
        op + "out must have shape [2, 4, 8, 9], as x, weight and the parameters give it, got [2, 4, 8, 8]",
    )
    yield CErrorCase(
        "input channels",
        {**args, "w": torch.zeros(4, 2, 3, 3)},
        "BAD_TENSOR_SHAPE",
        op + "weight must have 3 input channels, as x has, got 2 (shape [4, 2, 3, 3])",
    )
    yield CErrorCase(
        "stride 0", {**args, "strides": [1, 0]}, "BAD_PARAM",
        op + "stride must be 1 to 2^31 - 1, got 0 for spatial dimension 1",
    )  # fmt: skip
    yield CErrorCase(
        "negative padding", {**args, "pads": [-1, 0]}, "BAD_PARAM",
        op + "padding must be 0 to 2^31 - 1, got -1 for spatial dimension 0",
    )  # fmt: skip
    yield CErrorCase(
        "spatial dimensions", {**args, "n": 7}, "BAD_PARAM",
        "infiniopCreateConvDescriptor: n must be 1 to 6, the spatial dimensions, got 7",
    )  # fmt: skip
    yield CErrorCase(
        "rank", {**args, "n": 1}, "BAD_TENSOR_SHAPE",
        op + "x must have 3 dimensions, got 4 (shape [2, 3, 8, 9])",
    )  # fmt: skip
    yield CErrorCase(
        "float64", {**args, "x": args["x"].double()}, "BAD_TENSOR_DTYPE",
        op + "x must be float32, bfloat16 or float16, got float64",
    )  # fmt: skip
    yield CErrorCase(
        "broadcast output", {**args, "y": Described(torch.zeros(4, 8, 9), (2, 4, 8, 9), (0, 72, 9, 1))},
        "BAD_TENSOR_STRIDES",
        op + "out must not be a broadcast view, for it is written to, got strides [0, 72, 9, 1]",
    )  # fmt: skip


C_OPS = [COp("Conv", ["y"], reference, samples, errors)]
