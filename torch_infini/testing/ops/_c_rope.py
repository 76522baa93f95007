"""RoPE of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

GPT_J, GPT_NEOX = 0, 1
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
POSITIONS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
# A half type rounds a sum of two products once: where these cancel, a float's rounding of them shows.
TOLERANCES = {
    torch.float64: (1e-13, 1e-13),
    torch.float32: (2e-6, 1e-6),
    torch.bfloat16: (2**-8, 1e-6),
    torch.float16: (2**-10, 1e-6),
}


def reference(
    y: Tensor, x: Tensor, pos_ids: Tensor, sin_table: Tensor, cos_table: Tensor, algo: int
) -> dict[str, Tensor]:
    rows = pos_ids.long()
    c, s = cos_table.double()[rows].unsqueeze(-2), sin_table.double()[rows].unsqueeze(-2)
    if algo == GPT_J:
        x0, x1 = x.double()[..., ::2], x.double()[..., 1::2]
        return {"y": torch.stack((x0 * c - x1 * s, x0 * s + x1 * c), -1).reshape(x.shape)}
    x0, x1 = x.double().chunk(2, -1)
    return {"y": torch.cat((x0 * c - x1 * s, x0 * s + x1 * c), -1).reshape(x.shape)}


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype, algo: int, tables: torch.dtype | None = None, rows: int = 50
) -> dict[str, Any]:
    angle = torch.randn(rows, shape[-1] // 2)
    return {
        "y": torch.full(shape, 77, dtype=dtype),
        "x": torch.randn(shape).to(dtype),
        "pos_ids": torch.randint(rows, shape[:-2]),
        "sin_table": angle.sin().to(tables or dtype),
        "cos_table": angle.cos().to(tables or dtype),
        "algo": algo,
    }


def samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        for algo in (GPT_J, GPT_NEOX):
            kind = f"{str(dtype)[6:]} {('GPT-J', 'GPT-NeoX')[algo]}"
            for shape in ((1, 1, 2), (5, 4, 64), (2, 3, 4, 74), (0, 2, 8), (3, 0, 8), (3, 2, 0), (2, 50, 8, 128)):
                yield CSample(f"{kind} {shape}", tensors(shape, dtype, algo))
            args = tensors((3, 5, 4, 40), dtype, algo)
            yield CSample(f"{kind} pos_ids for all", {**args, "pos_ids": args["pos_ids"][0]})
            yield CSample(f"{kind} pos_ids [1, seq]", {**args, "pos_ids": args["pos_ids"][1:2]})
            args = tensors((5, 4, 40), dtype, algo)
            yield CSample(f"{kind} pos_ids of a batch of one", {**args, "pos_ids": args["pos_ids"][None]})
            args = tensors((3, 5, 4, 40), dtype, algo)
            args["x"] = args["x"].transpose(1, 2).contiguous().transpose(1, 2)
            args["y"] = torch.cat((args["y"], args["y"]), -1)[..., 40:]
            args["pos_ids"] = args["pos_ids"].T.contiguous().T
            args["sin_table"] = torch.cat((args["sin_table"], args["sin_table"]), -1)[:, 20:]
            args["cos_table"] = torch.cat((args["cos_table"], args["cos_table"]), -1)[:, :20]
            yield CSample(f"{kind} strides", args)
            args = tensors((5, 4, 40), dtype, algo)
            args["x"] = args["x"][:, :1].expand(5, 4, 40)
            args["pos_ids"] = Described(args["pos_ids"], (5,), (-1,), 4)
            args["y"] = Described(args["y"], (5, 4, 40), (-160, 40, 1), 640)
            yield CSample(f"{kind} broadcast and negative strides", args)
            args = tensors((5, 4, 40), dtype, algo)
            yield CSample(f"{kind} in place", {**args, "y": args["x"]})
            if dtype.itemsize == 2:
                yield CSample(f"{kind} float32 tables", tensors((5, 4, 40), dtype, algo, torch.float32))
    for positions in POSITIONS:
        args = tensors((2, 5, 3, 16), torch.float32, GPT_NEOX)
        yield CSample(f"{str(positions)[6:]} positions", {**args, "pos_ids": args["pos_ids"].to(positions)})


def errors() -> Iterator[CErrorCase]:
    op = "infini::rope: "
    args = tensors((2, 3, 4, 8), torch.float32, GPT_NEOX)
    odd = tensors((3, 4, 7), torch.float32, GPT_NEOX)
    yield CErrorCase(
        "algo",
        {**args, "algo": 2},
        "BAD_PARAM",
        "infiniopCreateRoPEDescriptor: algo must be 0 (GPT_J) or 1 (GPT_NEOX), got 2",
    )
    refused: list[tuple[str, dict[str, Any], str, str]] = [
        ("odd columns", odd, "BAD_TENSOR_SHAPE", "x must have an even number of columns, got 7 (shape [3, 4, 7])"),
        (
            "partial",
            {"cos_table": args["cos_table"][:, :3], "sin_table": args["sin_table"][:, :3]},
            "BAD_TENSOR_SHAPE",
            "cos must have 4 columns, half the last dimension of x, got 3 (shape [50, 3])",
        ),
        ("rank", {"x": args["x"][0, 0]}, "BAD_TENSOR_SHAPE", "x must have 3 to 4 dimensions, got 2 (shape [4, 8])"),
        (
            "integers",
            {"x": args["x"].int()},
            "BAD_TENSOR_DTYPE",
            "x must be float32, bfloat16, float16 or float64, got int32",
        ),
        (
            "tables",
            {"cos_table": args["cos_table"].half()},
            "BAD_TENSOR_DTYPE",
            "cos must be float32 as x is, got float16",
        ),
        (
            "sines",
            {"sin_table": args["sin_table"].half()},
            "BAD_TENSOR_DTYPE",
            "sin must have the dtype of cos, float32, got float16",
        ),
        (
            "sin shape",
            {"sin_table": args["sin_table"][:9]},
            "BAD_TENSOR_SHAPE",
            "sin must have the shape of cos, [50, 4], got [9, 4]",
        ),
        (
            "output shape",
            {"y": args["y"][:1]},
            "BAD_TENSOR_SHAPE",
            "out must have the shape of x, [2, 3, 4, 8], got [1, 3, 4, 8]",
        ),
        (
            "output dtype",
            {"y": args["y"].half()},
            "BAD_TENSOR_DTYPE",
            "out must have the dtype of x, float32, got float16",
        ),
        (
            "broadcast output",
            {"y": args["y"][:1].expand(2, 3, 4, 8)},
            "BAD_TENSOR_STRIDES",
            "out must not be a broadcast view, for it is written to, got strides [0, 32, 8, 1]",
        ),
        (
            "columns",
            {"x": torch.ones(2, 3, 4, 16)[..., ::2]},
            "BAD_TENSOR_STRIDES",
            "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [192, 64, 16, 2]",
        ),
        (
            "positions dtype",
            {"pos_ids": args["pos_ids"].float()},
            "BAD_TENSOR_DTYPE",
            "positions must be int64, int32, int16, int8, uint64, uint32, uint16 or uint8, got float32",
        ),
        (
            "positions shape",
            {"pos_ids": args["pos_ids"][:, :2]},
            "BAD_TENSOR_SHAPE",
            "positions must have shape [3] or [2 or 1, 3] to match x, got [2, 2]",
        ),
    ]
    for case, changed, status, sentence in refused:
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    for dtype, value in ((torch.int64, 50), (torch.int8, -1), (torch.uint8, 200)):
        positions = args["pos_ids"].to(dtype)
        positions[1, 2] = value
        yield CErrorCase(
            f"{str(dtype)[6:]} position {value}",
            {**args, "pos_ids": positions},
            "BAD_PARAM",
            op + f"positions must be at least 0 and less than 50, the rows of cos, got {value} at [1, 2]",
            at="run",
            of_values=True,
        )
    memory = torch.ones(200)
    yield CErrorCase(
        "partial overlap",
        {**args, "x": memory[8:].view(2, 3, 4, 8), "y": memory[:192].view(2, 3, 4, 8)},
        "BAD_PARAM",
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [COp("RoPE", ["y"], reference, samples, errors, tolerances=TOLERANCES)]
