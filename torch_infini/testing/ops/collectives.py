"""The collectives: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops import REGISTRY
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes

# The registry's tests use one process, group 0, whose collectives return their input. tests/test_distributed_ops.py
# tests several ranks.


def all_reduce_reference(x: Tensor, group: int = 0, op: int = 0) -> Tensor:
    return x.double()


def broadcast_reference(x: Tensor, group: int = 0, root: int = 0) -> Tensor:
    return x.double()


def all_gather_reference(x: Tensor, group: int = 0, group_size: int = 1) -> Tensor:
    return x.double()


def reduce_scatter_reference(x: Tensor, group: int = 0, group_size: int = 1, op: int = 0) -> Tensor:
    return x.double()


def peer(x: Tensor, *numbers: int) -> Tensor:
    return x.clone()


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("rows", (values(dtype, 3, 1023),))
    yield Sample("one row", (values(dtype, 1, 4096),))
    yield Sample("vector", (values(dtype, 17),))
    yield Sample("three dimensions", (values(dtype, 4, 5, 6),))
    yield Sample("transposed", (values(dtype, 40, 9).t(),))
    yield Sample("empty", (values(dtype, 0, 7),))
    yield Sample("large", (values(dtype, 300, 2049),))


def errors_of(name: str, *cases: tuple[str, dict[str, Any], str]) -> Callable[[], Iterator[ErrorCase]]:
    """Return the error cases of all four ops plus an op's own: name, keyword arguments, message without its prefix."""

    def errors() -> Iterator[ErrorCase]:
        x = torch.ones(4, 6)
        op = f"infini::{name}: "
        yield ErrorCase(
            "no such group",
            (x, 123456),
            op + "group must be 0 (this process by itself) or what torch_infini.distributed.communicator gave for a "
            "process group that is still there, got 123456",
        )
        yield ErrorCase(
            "out dtype", (x,), op + "out must have the dtype of x, float32, got float64", {"out": x.double()}
        )
        yield ErrorCase(
            "out shape",
            (x,),
            op + "out must have the shape of the result, [4, 6], got [6, 4]",
            {"out": x.new_ones(6, 4)},
        )
        for case, arguments, sentence in cases:
            yield ErrorCase(case, (x,), op + sentence, arguments)

    return errors


REDUCTION = ("reduction", {"op": 5}, "op must be 0 (sum), 1 (product), 2 (max), 3 (min) or 4 (mean), got 5")
SIZE = ("group size", {"group_size": 2}, "group_size must be the number of the group's ranks, 1, got 2")
ROOT = ("root", {"root": 1}, "root must be a rank of the group, 0 to 0, got 1")


def cost(x: Tensor, *numbers: int) -> Cost:
    return Cost(bytes=2 * nbytes(x))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("1x4096", (values(dtype, 1, 4096),))
    yield Sample("512x4096", (values(dtype, 512, 4096),))


def info(name: str, reference: Callable[..., Tensor], *cases: tuple[str, dict[str, Any], str]) -> OpInfo:
    return OpInfo(
        **vars(REGISTRY[name]),
        reference=reference,
        samples=samples,
        errors=errors_of(name, *cases),
        cost=cost,
        bench=bench,
        peer=peer,
    )


INFOS = (
    info("all_reduce", all_reduce_reference, REDUCTION),
    info("broadcast", broadcast_reference, ROOT),
    info("all_gather", all_gather_reference, SIZE),
    info("reduce_scatter", reduce_scatter_reference, SIZE, REDUCTION),
)
