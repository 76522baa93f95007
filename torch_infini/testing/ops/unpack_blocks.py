"""unpack_blocks: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops._block_panels import blocks_of
from ...ops.unpack_blocks import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from . import pack_blocks


def peer(weight: Tensor, packed: Tensor, kind: int, first_row: int = 0) -> None:
    if weight.numel():
        weight.copy_(blocks_of(packed, kind)[first_row : first_row + len(weight)])


def reference(weight: Tensor, packed: Tensor, kind: int, first_row: int = 0) -> tuple[Tensor]:
    after = weight.clone()
    peer(after, packed, kind, first_row)
    return (after.double(),)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in pack_blocks.samples(dtype):
        packed, weight, *rest = sample.args
        yield Sample(sample.name, (weight, packed, *rest))


def errors() -> Iterator[ErrorCase]:
    yield from pack_blocks.errors_of("unpack_blocks", 1)


def cost(weight: Tensor, packed: Tensor, kind: int, first_row: int = 0) -> Cost:
    return Cost(bytes=2 * nbytes(weight))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in pack_blocks.bench(dtype):
        packed, weight, *rest = sample.args
        yield Sample(sample.name, (weight, packed, *rest))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=(torch.uint8,),
    tolerances={torch.uint8: (0.0, 0.0)},
)
