"""DequantizeAWQ of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample
from ._c_paged import reversed_

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight columns


def unpacked(words: Tensor) -> Tensor:
    return torch.stack([(words.long() >> 4 * nibble) & 15 for nibble in NIBBLES], -1).flatten(-2)


def reference(out: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    if out.numel() == 0:
        return {"out": out}
    size = out.shape[0] // scales.shape[0]
    z, s = (x.repeat_interleave(size, 0) for x in (unpacked(zeros), scales.double()))
    # As the op: rounded to float16 once. Exact before, so that all bits are determined.
    return {"out": ((unpacked(qweight) - z) * s).half()}


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


def tensors(rows: int, columns: int, groups: int) -> dict[str, Any]:
    return {
        "out": torch.full((rows, columns), 77.0).half(),
        "qweight": words(rows, columns // 8),
        "scales": torch.randn(groups, columns).half(),
        "zeros": words(groups, columns // 8),
    }


def samples() -> Iterator[CSample]:
    for rows, columns, groups in ((1, 8, 1), (6, 24, 3), (5, 40, 5), (256, 512, 2), (0, 8, 0), (0, 8, 2), (4, 0, 2)):
        yield CSample(f"{rows}x{columns}, {groups} groups", tensors(rows, columns, groups))
    args = tensors(8, 48, 2)
    for key in args:
        args[key] = torch.cat((args[key], args[key]), -1)[:, args[key].shape[1] :]
    yield CSample("row strides", args)
    args = tensors(8, 48, 2)
    args = {**args, "scales": args["scales"][:1].expand(2, 48), "zeros": args["zeros"][:1].expand(2, 6)}
    yield CSample("broadcast", args)
    yield CSample("negative strides", {key: reversed_(x) for key, x in tensors(8, 48, 2).items()})
    args = tensors(4, 16, 1)
    args["scales"] = torch.tensor([6e-8, 1e-7, 6.1e-5, 5e-5, 65504.0, 4400.0, -0.0, 0.0] * 2).half()[None]
    yield CSample("scales at the ends of the range", args)
    yield CSample("large", tensors(512, 1024, 4))


def errors() -> Iterator[CErrorCase]:
    op = "infini::dequantize_awq: "
    args = tensors(6, 16, 3)
    for case, changed, status, sentence in (
        ("rank", {"out": args["out"][0]}, "BAD_TENSOR_SHAPE", "out must have 2 dimensions, got 1 (shape [16])"),
        ("out dtype", {"out": args["out"].float()}, "BAD_TENSOR_DTYPE", "out must be float16, got float32"),
        (
            "columns",
            {"out": args["out"][:, :12]},
            "BAD_TENSOR_SHAPE",
            "out must have a multiple of 8 columns, got 12 (shape [6, 12])",
        ),
        (
            "strided columns",
            {"out": torch.ones(6, 32).half()[:, ::2]},
            "BAD_TENSOR_STRIDES",
            "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
        ),
        (
            "broadcast out",
            {"out": args["out"][:1].expand(6, 16)},
            "BAD_TENSOR_STRIDES",
            "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        ),
        ("qweight dtype", {"qweight": words(6, 2).long()}, "BAD_TENSOR_DTYPE", "qweight must be int32, got int64"),
        (
            "qweight shape",
            {"qweight": words(6, 3)},
            "BAD_TENSOR_SHAPE",
            "qweight must have shape [6, 2] for eight columns of out in each integer, got [6, 3]",
        ),
        ("scales dtype", {"scales": torch.ones(3, 16)}, "BAD_TENSOR_DTYPE", "scales must be float16, got float32"),
        (
            "scales columns",
            {"scales": torch.ones(3, 8).half()},
            "BAD_TENSOR_SHAPE",
            "scales must have shape [3, 16] to match the columns of out, got [3, 8]",
        ),
        (
            "groups",
            {"scales": torch.ones(4, 16).half(), "zeros": words(4, 2)},
            "BAD_TENSOR_SHAPE",
            "scales must have a number of rows that divides the 6 rows of out, got 4",
        ),
        (
            "zeros shape",
            {"zeros": words(2, 2)},
            "BAD_TENSOR_SHAPE",
            "zeros must have shape [3, 2] to match the groups of scales and the columns of out, got [2, 2]",
        ),
        ("zeros dtype", {"zeros": words(3, 2).short()}, "BAD_TENSOR_DTYPE", "zeros must be int32, got int16"),
    ):
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    memory = torch.zeros(200).half()
    yield CErrorCase(
        "out in scales",
        {**args, "out": memory[:96].view(6, 16), "scales": memory[80:128].view(3, 16)},
        "BAD_PARAM",
        op + "out must share no memory with scales, got one whose span of memory overlaps it",
        at="run",
    )


C_OPS = [COp("DequantizeAWQ", ["out"], reference, samples, errors, tolerances={torch.float16: (0, 0)})]
