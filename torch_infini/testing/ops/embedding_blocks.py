"""embedding_blocks: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops._block_panels import blocks_of
from ...ops._blocks import KINDS
from ...ops.embedding_blocks import SPEC
from ..op_info import TOLERANCES, Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear_block_panels import in_panels
from .linear_blocks import BY_NUMBER, random_weight


def in_rows(weight: Tensor, kind: int) -> Tensor:
    """Return a table in rows of blocks, which may be in panels."""
    return weight if weight.shape[2] == BY_NUMBER[kind].bytes else blocks_of(weight, kind)


def reference(ids: Tensor, weight: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
    return BY_NUMBER[kind].dequantize(in_rows(weight, kind)[ids.long()]).double()


def peer(ids: Tensor, weight: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
    return BY_NUMBER[kind].dequantize(in_rows(weight, kind)[ids], dtype)


def inputs(dtype: torch.dtype, m: int, kind: str, blocks: int, v: int) -> tuple[Tensor, Tensor, int, torch.dtype]:
    """Make (ids, weight, kind, dtype)."""
    of = KINDS[kind]
    ids = torch.randint(max(v, 1), (m,), generator=torch.Generator().manual_seed(0))
    return ids, random_weight(of, v, blocks * of.elements).clone(), of.number, dtype


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in KINDS:
        yield Sample(kind, inputs(dtype, 5, kind, 3, 11))
    for m in (1, 2, 300):
        yield Sample(f"{m} ids", inputs(dtype, m, "q6_k", 2, 40))
    for blocks in (1, 15, 16, 17, 40):
        yield Sample(f"{blocks} blocks", inputs(dtype, 4, "q5_0", blocks, 13))
    ids, weight, number, _ = inputs(dtype, 12, "q4_k", 4, 20)
    yield Sample("int32 ids", (ids.int(), weight, number, dtype))
    yield Sample("every second id", (ids[::2], weight, number, dtype))
    yield Sample("one id for all", (ids[:1].expand(4), weight, number, dtype))
    yield Sample("a part of the columns", (ids, weight[:, 1:3], number, dtype))
    yield Sample("every other row", (ids // 2, weight[::2], number, dtype))
    apart = torch.empty(weight.numel() + 1, dtype=torch.uint8)[1:].view(weight.shape).copy_(weight)
    yield Sample("an odd address", (ids, apart, number, dtype))
    for name in ("q4_k", "q6_k", "q8_0", "q5_1"):
        some, rows, of, _ = inputs(dtype, 9, name, 3, 48)
        yield Sample(f"{name} in panels", (some, in_panels(rows, of), of, dtype), cpu_only=True)
    yield Sample("no ids", (ids[:0], weight, number, dtype))
    yield Sample("no columns", (ids, weight[:, :0], number, dtype))
    yield Sample("no rows and no ids", (ids[:0], weight[:0], number, dtype))


def errors() -> Iterator[ErrorCase]:
    op = "infini::embedding_blocks: "
    ids, weight, kind, dtype = inputs(torch.float32, 4, "q8_0", 3, 8)
    known = ", ".join(f"{one.number} ({one.name})" for one in KINDS.values())
    outside = op + "ids must be at least 0 and less than 8, the number of rows of weight, got "
    for name, bad in (("too large", 8), ("negative", -1)):
        yield ErrorCase(
            name, (torch.tensor([0, bad]), weight, kind, dtype), outside + f"{bad} at ids[1]", of_values=True
        )
    yield ErrorCase("unknown kind", (ids, weight, 5, dtype), op + f"kind must be one of {known}, got 5")
    yield ErrorCase("ids dtype", (ids.float(), weight, kind, dtype), op + "ids must be int64 or int32, got float32")
    yield ErrorCase(
        "ids rank", (ids[None], weight, kind, dtype), op + "ids must have 1 dimension, got 2 (shape [1, 4])"
    )
    yield ErrorCase("weight dtype", (ids, weight.view(torch.int8), kind, dtype), op + "weight must be uint8, got int8")
    yield ErrorCase(
        "weight rank", (ids, weight[0], kind, dtype), op + "weight must have 3 dimensions, got 2 (shape [3, 34])"
    )
    yield ErrorCase(
        "weight of another kind",
        (ids, weight, 2, dtype),
        op + "weight must have shape [8, 3, 18] to match the kind of block, got [8, 3, 34]",
    )
    yield ErrorCase(
        "blocks apart",
        (ids, weight[:, ::2], kind, dtype),
        op + "weight must have the blocks of a row adjacent (call .contiguous() on it), got strides [102, 68, 1]",
    )
    yield ErrorCase(
        "out shape",
        (ids, weight, kind, dtype),
        op + "out must have shape [4, 96] to match ids and a row of weight, got [4, 95]",
        {"out": torch.empty(4, 95)},
    )


def cost(ids: Tensor, weight: Tensor, kind: int, dtype: torch.dtype) -> Cost:
    row = weight.shape[1] * (weight.shape[2] + BY_NUMBER[kind].elements * dtype.itemsize)
    return Cost(bytes=nbytes(ids) + ids.numel() * row)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in ("q4_k", "q6_k", "q8_0"):
        for tokens, columns in ((1, 2048), (512, 4096)):
            yield Sample(f"{kind} {tokens}x{columns}", inputs(dtype, tokens, kind, columns // KINDS[kind].elements, 64))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=TOLERANCES,
)
