"""layer_norm: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ops.layer_norm import SPEC
from ..c_door import c_op
from ..c_layouts import apart, backwards, every_layout, last_dimension_first
from ..c_ops import CErrorCase
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    difference = x.double() - x.double().mean(-1, keepdim=True)
    y = difference / (difference.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * weight.double()
    return y if bias is None else y + bias.double()


def peer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make (x, weight, bias): x has a mean other than 0 and a few large columns."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g) * 3 + 0.5
    x[..., ::97] *= 20
    weight, bias = 1 + 0.1 * torch.randn(shape[-1], generator=g), torch.randn(shape[-1], generator=g)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (7, 769, 5125):
        yield Sample(f"{n} columns", inputs(dtype, 3, n))
    yield Sample("one column", inputs(dtype, 3, 1))
    yield Sample("one dimension", inputs(dtype, 64))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 4, 32))
    yield Sample("eight dimensions", inputs(dtype, 1, 2, 1, 3, 2, 1, 2, 5))
    yield Sample("no rows", inputs(dtype, 0, 16))
    yield Sample("no columns", inputs(dtype, 4, 0))
    yield Sample("large", inputs(dtype, 300, 1024))
    x, weight, bias = inputs(dtype, 5, 100)
    yield Sample("weight alone", (x, weight))
    yield Sample("bias alone", (x, None, bias))
    yield Sample("neither", (x,))
    yield Sample("another eps", (x, weight, bias, 0.5))
    yield Sample("strided columns", (x[:, ::2], weight[::2], bias[1::2]))
    yield Sample("transposed", (x.t(), weight[:5], bias[:5]))
    yield Sample("broadcast", (x[:1].expand(4, 100), weight[:1].expand(100), bias[:1].expand(100)))
    yield Sample("zeros", (torch.zeros(2, 33, dtype=dtype), weight[:33], bias[:33]))
    far = (torch.arange(100) % 2 * 8 + 1024).expand(3, 100).to(dtype)  # its mean is exact
    yield Sample("a mean far from 0", (far, weight, bias))
    if dtype.itemsize == 2:
        yield Sample("float32 weight and bias", (x, weight.float() * 1.001, bias.float() * 1.001))
        yield Sample("float32 bias, strided", (x[:, ::2], None, (bias.float() * 1.001)[1::2]))
    special = x.clone()
    special[0, 3], special[1, 3] = torch.inf, torch.nan
    yield Sample("infinity and NaN", (special, weight, bias))


def errors() -> Iterator[ErrorCase]:
    x, weight, bias = inputs(torch.float32, 3, 8)
    op = "infini::layer_norm: "
    yield ErrorCase("scalar", (x[0, 0], weight, bias), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), weight, bias), op + "x must be float32, bfloat16 or float16, got float64")
    for name, short in (("weight", (x, weight[:7])), ("bias", (x, weight, bias[:7]))):
        message = op + f"{name} must have shape [8] to match the last dimension of x, got [7]"
        yield ErrorCase(f"short {name}", short, message)
    for name, half in (("weight", (x, weight.half())), ("bias", (x, weight, bias.half()))):
        yield ErrorCase(f"{name} dtype", half, op + f"{name} must have the dtype of x, float32, got float16")
    for eps in (-1.0, float("nan")):
        text = op + f"eps must be a finite number of at least 0, got {eps:g}"
        yield ErrorCase(f"eps {eps}", (x, weight, bias, eps), text)
    yield ErrorCase("meta weight", (x, weight.to("meta")), op + "weight must be on the device of x, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (x, weight, bias),
        op + "out must have the shape of x, [3, 8], got [3, 7]",
        {"out": torch.empty(3, 7)},
    )
    yield ErrorCase(
        "out dtype",
        (x, weight, bias),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(3, 8, dtype=torch.float16)},
    )
    yield ErrorCase(
        "broadcast out",
        (x, weight, bias),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8).expand(3, 8)},
    )
    yield ErrorCase(
        "out overlaps",
        (x[:2], weight, bias),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": x[1:]},
    )
    yield ErrorCase(
        "out is bias",
        (x[:1], weight, bias),
        op + "out must share no memory with bias, got one whose span of memory overlaps it",
        {"out": bias.view(1, 8)},
    )


def cost(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight, bias), flops=8 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((512, 4096), (16384, 4096), (1, 2048)):
        yield Sample(f"{rows}x{columns}", inputs(dtype, rows, columns))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances={torch.float32: (2e-6, 8e-6), torch.bfloat16: (2**-8, 1e-5), torch.float16: (2**-11, 1e-5)},
)


def with_statistics(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the C operator's results: the result, the standardized x, each row's standard deviation."""
    difference = x.double() - x.double().mean(-1, keepdim=True)
    sigma = (difference.square().mean(-1, keepdim=True) + eps).sqrt()
    return reference(x, weight, bias, eps), difference / sigma, sigma.squeeze(-1)


def to_c(args: dict[str, Any]) -> dict[str, Any] | None:
    return None if args["weight"] is None else {"input": args.pop("x"), **args}


def c_layouts(args: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, call in every_layout(args, C_OUTPUTS):
        if name not in ("one column for all", "one number for all"):  # for equal numbers only rounding errors are left
            yield name, call
    yield "standardised in place", {**args, "input_standardization": args["input"]}
    yield "strided parameters", {**args, "weight": args["weight"][:1].expand(37), "bias": apart(args["bias"])}
    yield "reversed parameters", {**args, "weight": backwards(args["weight"]), "bias": backwards(args["bias"])}
    yield "strided deviations", {**args, "input_std_deviation": apart(args["input_std_deviation"])}
    yield "transposed deviations", args | {key: last_dimension_first(args[key]) for key in ("input", C_OUTPUTS[2])}


def c_varied(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("", inputs(dtype, 4, 5, 37))


def c_errors() -> Iterator[CErrorCase]:
    """Yield calls with invalid statistics outputs, which the torch op lacks."""
    x, weight, bias = inputs(torch.float32, 4, 8)
    made = dict(zip(C_OUTPUTS, (torch.ones(4, 8), torch.ones(4, 8), torch.ones(4)), strict=True))
    args: dict[str, Any] = {**made, "input": x, "weight": weight, "bias": bias, "eps": 1e-5}
    _, standard, deviation = C_OUTPUTS
    overlaps = "got one whose span of memory overlaps it"
    for what, key, value, status, rule in (
        ("shape", standard, torch.ones(4, 9), "SHAPE", "have the shape of input, [4, 8], got [4, 9]"),
        ("dtype", standard, torch.ones(4, 8).bfloat16(), "DTYPE", "have the dtype of input, float32, got bfloat16"),
        ("broadcast", standard, torch.ones(1, 8).expand(4, 8), "STRIDES",
         "not be a broadcast view, for it is written to, got strides [0, 1]"),
        ("shape", deviation, torch.ones(4, 1), "SHAPE",
         "have the shape of input without its last dimension, [4], got [4, 1]"),
        ("dtype", deviation, torch.ones(4).half(), "DTYPE", "have the dtype of input, float32, got float16"),
        ("broadcast", deviation, torch.ones(1).expand(4), "STRIDES",
         "not be a broadcast view, for it is written to, got strides [0]"),
    ):  # fmt: skip
        message = f"infini::layer_norm: {key} must {rule}"
        yield CErrorCase(f"{what} of {key}", {**args, key: value}, f"BAD_TENSOR_{status}", message)
    for key, other, rule in (
        (standard, "output", "share no memory with output"),
        (deviation, "output", "share no memory with output"),
        (deviation, "input", "share no memory with input"),
        (deviation, standard, f"share no memory with {standard}"),
    ):
        shared = {**args, key: args[other] if key == standard else args[other].view(-1)[:4]}
        message = f"infini::layer_norm: {key} must {rule}, {overlaps}"
        yield CErrorCase(f"{key} is {other}", shared, "BAD_PARAM", message, at="run")


C_OUTPUTS = ["output", "input_standardization", "input_std_deviation"]
C_OPS = [
    c_op(
        replace(
            INFO,
            reference=with_statistics,
            fake=lambda x, *_, **__: (torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[:-1])),
        ),
        "LayerNorm",
        C_OUTPUTS,
        {"x": "input"},
        to_c=to_c,
        errors=c_errors,
        words={"out": "output", "x": "input"},
        variants=c_layouts,
        varied=c_varied,
    )
]
