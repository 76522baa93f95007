"""dequantize_awq: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.dequantize_awq import SPEC
from ..c_door import all_but, c_op, unwritten
from ..c_ops import CErrorCase
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def unpacked(words: Tensor) -> Tensor:
    """Return the 4-bit values, eight columns per integer."""
    return torch.stack([(words >> 4 * nibble) & 15 for nibble in (0, 4, 1, 5, 2, 6, 3, 7)], -1).flatten(-2)


def weights(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the weights in the dtype of scales."""
    rows = qweight.shape[0] // max(scales.shape[0], 1)
    z, s = (group.repeat_interleave(rows, 0) for group in (unpacked(zeros), scales))
    return (unpacked(qweight) - z) * s


def reference(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    # As in the op: exact before the one rounding to float16, so that all bits are determined.
    return weights(qweight, scales.double(), zeros).half()


def peer(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return weights(qweight, scales, zeros)


def inputs(k: int, n: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=g).int()

    return words(k, n // 8), torch.randn(groups, n, generator=g).half(), words(groups, n // 8)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for k, n, groups in ((1, 8, 1), (6, 24, 3), (5, 40, 5), (12, 1016, 4)):
        yield Sample(f"{k}x{n}, {groups} groups", inputs(k, n, groups))
    qweight, scales, zeros = inputs(8, 48, 2)
    yield Sample("a broadcast group", (qweight, scales[:1].expand(2, 48), zeros[:1].expand(2, 6)))
    edges = torch.tensor([6e-8, 1e-7, 6.1e-5, 5e-5, 65504.0, 4400.0, -0.0, 0.0] * 2).half()
    qweight, _, zeros = inputs(4, 16, 1)
    yield Sample("scales at the ends of the range", (qweight, edges[None], zeros))
    yield Sample("no rows, no groups", inputs(0, 8, 0))
    yield Sample("no rows", inputs(0, 8, 2))
    yield Sample("no columns", inputs(4, 0, 2))
    yield Sample("large", inputs(300, 1024, 3))


def errors() -> Iterator[ErrorCase]:
    op = "infini::dequantize_awq: "
    qweight, scales, zeros = inputs(6, 16, 3)
    yield ErrorCase("rank", (qweight[0], scales, zeros), op + "qweight must have 2 dimensions, got 1 (shape [2])")
    yield ErrorCase("qweight dtype", (qweight.long(), scales, zeros), op + "qweight must be int32, got int64")
    yield ErrorCase(
        "strided qweight",
        (inputs(2, 48, 1)[0].t(), scales, zeros),
        op + "qweight must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 6]",
    )
    yield ErrorCase("scales dtype", (qweight, scales.float(), zeros), op + "scales must be float16, got float32")
    yield ErrorCase(
        "scales columns",
        (qweight, scales[:, :8], zeros),
        op + "scales must have shape [3, 16] to match the columns of out, got [3, 8]",
    )
    _, four_scales, four_zeros = inputs(8, 16, 4)
    yield ErrorCase(
        "groups",
        (qweight, four_scales, four_zeros),
        op + "scales must have a number of rows that divides the 6 rows of out, got 4",
    )
    yield ErrorCase(
        "zeros shape",
        (qweight, scales, zeros[:2]),
        op + "zeros must have shape [3, 2] to match the groups of scales and the columns of out, got [2, 2]",
    )
    yield ErrorCase("zeros dtype", (qweight, scales, zeros.short()), op + "zeros must be int32, got int16")
    yield ErrorCase(
        "out shape",
        (qweight, scales, zeros),
        op + "qweight must have shape [6, 1] for eight columns of out in each integer, got [6, 2]",
        {"out": torch.empty(6, 8).half()},
    )
    yield ErrorCase(
        "out dtype", (qweight, scales, zeros), op + "out must be float16, got float32", {"out": torch.empty(6, 16)}
    )
    yield ErrorCase(
        "out broadcast",
        (qweight, scales, zeros),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(16).half().expand(6, 16)},
    )
    memory = torch.zeros(200).half()
    yield ErrorCase(
        "out overlaps",
        (qweight, memory[80:128].view(3, 16), zeros),
        op + "out must share no memory with scales, got one whose span of memory overlaps it",
        {"out": memory[:96].view(6, 16)},
    )


def cost(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Cost:
    out = 2 * 8 * qweight.numel()
    return Cost(bytes=nbytes(qweight, scales, zeros) + out, flops=2 * 8 * qweight.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("4096x4096", inputs(4096, 4096, 32))
    yield Sample("4096x11008", inputs(4096, 11008, 32))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=(torch.float16,),
    tolerances={torch.float16: (0.0, 0.0)},
)


def c_errors() -> Iterator[CErrorCase]:
    """Yield calls with an output of an impossible shape."""
    args = dict(zip(INFO.arguments, inputs(6, 16, 3), strict=True))
    half = torch.float16
    for name, out, status, sentence in (
        ("rank", unwritten((16,), half), "SHAPE", "must have 2 dimensions, got 1 (shape [16])"),
        ("columns", unwritten((6, 12), half), "SHAPE", "must have a multiple of 8 columns, got 12 (shape [6, 12])"),
        (
            "strided columns",
            unwritten((6, 32), half)[:, ::2],
            "STRIDES",
            "must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
        ),
    ):
        sentence = f"infini::dequantize_awq: out {sentence}"
        yield CErrorCase(f"{name} of out", {"out": out, **args}, f"BAD_TENSOR_{status}", sentence)


C_OPS = [
    c_op(
        INFO,
        "DequantizeAWQ",
        ["out"],
        errors=c_errors,
        reversible=("out", "qweight", "scales", "zeros"),
        refuses=all_but("rank"),  # with a qweight of another rank, the shape of out is unknown
    )
]
