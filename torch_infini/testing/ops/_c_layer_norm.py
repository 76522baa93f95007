"""LayerNorm of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(
    output: Tensor,
    input_standardization: Tensor,
    input_std_deviation: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> dict[str, Tensor]:
    x = input.double()
    difference = x - x.mean(-1, keepdim=True)
    sigma = (difference.square().mean(-1, keepdim=True) + eps).sqrt()
    standard = difference / sigma
    scaled = standard * weight.double()
    return {
        "output": scaled if bias is None else scaled + bias.double(),
        "input_standardization": standard,
        "input_std_deviation": sigma.squeeze(-1),
    }


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77, dtype=dtype)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "output": filled(shape, dtype),
        "input_standardization": filled(shape, dtype),
        "input_std_deviation": filled(shape[:-1], dtype),
        "input": torch.randn(shape).to(dtype),
        "weight": torch.randn(shape[-1]).to(dtype),
        "bias": torch.randn(shape[-1]).to(dtype),
        "eps": 1e-5,
    }


def samples() -> Iterator[CSample]:
    for dtype in FLOATS:
        kind = str(dtype)[6:]
        # With bias, the output may be the difference of two larger numbers.
        tolerance = {torch.float32: (2e-6, 8e-6), torch.bfloat16: (2**-8, 1e-5), torch.float16: (2**-11, 1e-5)}[dtype]

        def sample(name: str, args: dict[str, Any], kind: str = kind, tol: Any = tolerance) -> CSample:
            return CSample(f"{kind} {name}", args, tol)

        for shape in ((7,), (4, 512), (2, 3, 769), (1, 2, 1, 3, 2, 1, 2, 5), (5, 1), (0, 8), (3, 0), (130, 2048)):
            yield sample(str(shape), tensors(shape, dtype))
        args = tensors((9, 100), dtype)
        yield sample("no bias", {**args, "bias": None})
        args = tensors((9, 100), dtype)
        yield sample("in place", {**args, "output": args["input"]})
        args = tensors((9, 100), dtype)
        yield sample("standardised in place", {**args, "input_standardization": args["input"]})
        args = tensors((9, 100), dtype)
        args["weight"] = args["weight"][:1].expand(100)
        args["bias"] = torch.randn(300).to(dtype)[::3]
        yield sample("strided parameters", args)
        args = tensors((9, 100), dtype)
        args["weight"] = Described(args["weight"], (100,), (-1,), 99)
        yield sample("reversed weight", args)
        args = tensors((3, 50, 33), dtype)
        args["input"] = torch.randn(33, 3, 50).to(dtype).permute(1, 2, 0)
        args["output"] = filled((3, 33, 50), dtype).transpose(1, 2)
        args["input_standardization"] = filled((3, 50, 70), dtype)[..., 1::2][..., :33]
        args["input_std_deviation"] = filled((50, 3), dtype).T
        yield sample("strided", args)
        args = tensors((6, 45), dtype)
        args["input"] = Described(args["input"], (6, 45), (-45, 1), 5 * 45)
        args["output"] = Described(args["output"], (6, 45), (45, -1), 44)
        yield sample("negative strides", args)
        args = tensors((4, 33), dtype)
        args["input"] = args["input"][:1].expand(4, 33)
        yield sample("a broadcast row", args)
        args = tensors((4, 256), dtype)
        args["input"] = (args["input"].float() * 0.5 + 1000).to(dtype)
        yield CSample(f"{kind} a mean far from 0", args, (1e-3, 1e-3) if dtype == torch.float32 else (2**-7, 1e-3))


def errors() -> Iterator[CErrorCase]:
    args = tensors((4, 8), torch.float32)
    op = "infini::layer_norm: "
    for name in ("weight", "bias"):
        yield CErrorCase(
            f"short {name}",
            {**args, name: torch.ones(7)},
            "BAD_TENSOR_SHAPE",
            op + f"{name} must have shape [8] to match the last dimension of input, got [7]",
        )
        yield CErrorCase(
            f"{name} of another dtype",
            {**args, name: torch.ones(8, dtype=torch.float16)},
            "BAD_TENSOR_DTYPE",
            op + f"{name} must have the dtype of input, float32, got float16",
        )
    for name in ("output", "input_standardization"):
        yield CErrorCase(
            f"shape of {name}",
            {**args, name: torch.ones(4, 9)},
            "BAD_TENSOR_SHAPE",
            op + f"{name} must have the shape of input, [4, 8], got [4, 9]",
        )
        yield CErrorCase(
            f"dtype of {name}",
            {**args, name: torch.ones(4, 8, dtype=torch.bfloat16)},
            "BAD_TENSOR_DTYPE",
            op + f"{name} must have the dtype of input, float32, got bfloat16",
        )
        yield CErrorCase(
            f"{name} is broadcast",
            {**args, name: torch.ones(1, 8).expand(4, 8)},
            "BAD_TENSOR_STRIDES",
            op + f"{name} must not be a broadcast view, for it is written to, got strides [0, 1]",
        )
    yield CErrorCase(
        "shape of the deviation",
        {**args, "input_std_deviation": torch.ones(4, 1)},
        "BAD_TENSOR_SHAPE",
        op + "input_std_deviation must have the shape of input without its last dimension, [4], got [4, 1]",
    )
    yield CErrorCase(
        "integers",
        {**args, "input": torch.ones(4, 8, dtype=torch.int32)},
        "BAD_TENSOR_DTYPE",
        op + "input must be float32, bfloat16 or float16, got int32",
    )
    yield CErrorCase(
        "no dimensions",
        {**args, "input": torch.ones(())},
        "BAD_TENSOR_SHAPE",
        op + "input must have 1 to 8 dimensions, got 0 (shape [])",
    )
    yield CErrorCase(
        "eps", {**args, "eps": -1.0}, "BAD_PARAM", op + "eps must be a finite number of at least 0, got -1"
    )
    buffer = torch.ones(5, 8)
    yield CErrorCase(
        "overlap",
        {**args, "input": buffer[:4], "output": buffer[1:]},
        "BAD_PARAM",
        op + "output must be input itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )
    yield CErrorCase(
        "outputs overlap",
        {**args, "output": args["input_standardization"]},
        "BAD_PARAM",
        op + "input_standardization must share no memory with output, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [COp("LayerNorm", ["output", "input_standardization", "input_std_deviation"], reference, samples, errors)]
