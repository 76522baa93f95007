"""I8Gemm of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample


def reference(
    out: Tensor, bias: Tensor | None, x: Tensor, x_scale: Tensor, weights: Tensor, weights_scale: Tensor
) -> dict[str, Tensor]:
    # In float64 every product of bytes and their sum is exact.
    x, weights, rows, columns = x.double(), weights.double(), x_scale.reshape(-1, 1), weights_scale.reshape(1, -1)
    value = x @ weights * rows.double() * columns.double()
    return {"out": value if bias is None else value + bias.double()}


def tensors(m: int, n: int, k: int, dtype: torch.dtype, bias: bool = True) -> dict[str, Any]:
    return {
        "out": torch.full((m, n), 77, dtype=dtype),
        "bias": torch.randn(n).to(dtype) if bias else None,
        "x": torch.randint(-128, 128, (m, k), dtype=torch.int8),
        "x_scale": torch.rand(m) / 64,
        "weights": torch.randint(-128, 128, (n, k), dtype=torch.int8).T,
        "weights_scale": torch.rand(n) / 64,
    }


def samples() -> Iterator[CSample]:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        kind = str(dtype)[6:]
        # Cancellation between product and bias: the absolute error of float.
        close = ({torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-20}[dtype], 1e-4)
        for m, n, k in ((1, 1, 1), (3, 5, 7), (4, 4, 64), (5, 9, 65), (1, 130, 513), (33, 47, 130), (64, 256, 512)):
            yield CSample(f"{kind} {m}x{n}x{k}", tensors(m, n, k, dtype), close)
        yield CSample(f"{kind} without bias", tensors(6, 10, 100, dtype, bias=False), close)
        for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
            yield CSample(f"{kind} empty {m}x{n}x{k}", tensors(m, n, k, dtype), close)
        args = tensors(6, 10, 100, dtype)
        args["x"] = torch.randint(-128, 128, (6, 120), dtype=torch.int8)[:, 3:103]
        args["weights"] = torch.randint(-128, 128, (10, 111), dtype=torch.int8)[:, :100].T
        args["out"] = torch.zeros(6, 30, dtype=dtype)[:, 5:15]
        yield CSample(f"{kind} strided", args, close)
        for m, n, k in ((1, 5, 7), (33, 150, 130)):
            args = tensors(m, n, k, dtype)
            yield CSample(
                f"{kind} row-major weights {m}x{n}x{k}", {**args, "weights": args["weights"].contiguous()}, close
            )
        args = tensors(6, 10, 100, dtype)
        args["x_scale"], args["weights_scale"] = args["x_scale"][:, None], args["weights_scale"][None]
        yield CSample(f"{kind} scales with two dimensions", args, close)
        args = tensors(6, 10, 100, dtype)
        for name in ("out", "x", "weights"):
            args[name] = args[name][None]
        yield CSample(f"{kind} batch of one", {**args, "x_scale": args["x_scale"][:, None]}, close)
    extreme = tensors(5, 6, 131071, torch.bfloat16, bias=False)
    extreme["x"].fill_(-128)
    extreme["weights"].fill_(-128)
    extreme["weights"][:, 1] = 127
    yield CSample("largest sums", extreme, (2**-8, 0))


def errors() -> Iterator[CErrorCase]:
    args = tensors(4, 8, 16, torch.bfloat16)
    op = "infini::int8_gemm: "
    yield CErrorCase(
        "float64 result",
        {**args, "out": torch.zeros(4, 8).double()},
        "BAD_TENSOR_DTYPE",
        op + "out must be float32, bfloat16 or float16, got float64",
    )
    yield CErrorCase(
        "unsigned", {**args, "x": args["x"].view(torch.uint8)}, "BAD_TENSOR_DTYPE", op + "x must be int8, got uint8"
    )
    yield CErrorCase(
        "depth",
        {**args, "x": torch.zeros(4, 131072, dtype=torch.int8)},
        "BAD_TENSOR_SHAPE",
        op + "x must have at most 131071 columns, for int32 to hold the product, got 131072",
    )
    yield CErrorCase(
        "scales",
        {**args, "x_scale": torch.ones(5)},
        "BAD_TENSOR_SHAPE",
        op + "x_scale must have shape [4] to match the rows of the product, got [5]",
    )
    yield CErrorCase(
        "depths differ",
        {**args, "weights": torch.zeros(8, 15, dtype=torch.int8).T},
        "BAD_TENSOR_SHAPE",
        op + "weights must have shape [16, 8] to match the columns of the left factor, got [15, 8]",
    )


C_OPS = [COp("I8Gemm", ["out"], reference, samples, errors)]
