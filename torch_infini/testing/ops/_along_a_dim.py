"""Shared by softmax, causal_softmax and lp_norm, which compute along a dimension: values and error cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..op_info import ErrorCase


def scores(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make values typical for the input of a softmax, with a spread of 3."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def refused_inputs(op: str, x: Tensor) -> Iterator[ErrorCase]:
    """Yield calls with invalid inputs. op, here and below: the prefix of the messages."""
    yield ErrorCase("scalar", (x[0, 0],), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(),), op + "x must be float32, bfloat16 or float16, got float64")


def refused_dims(op: str, *args: object) -> Iterator[ErrorCase]:
    """Yield calls with an invalid dim. args: the arguments before dim; the first is an x of two dimensions."""
    for dim in (2, -3, 2**31 - 1, -(2**31)):
        yield ErrorCase(f"dimension {dim}", (*args, dim), op + f"dim must be in [-2, 1], got {dim}")
    yield ErrorCase("a dim of more than 32 bits", (*args, 2**32), op + "dim must be a dimension of x, got 4294967296")


def refused_out_dtype(op: str, x: Tensor) -> ErrorCase:
    """Make a call with an `out` of another dtype, for ops that do not support that; x is [3, 8], as in refused_outs."""
    return ErrorCase(
        "out dtype",
        (x,),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(3, 8, dtype=torch.float16)},
    )


def refused_outs(op: str, x: Tensor) -> Iterator[ErrorCase]:
    """Yield calls with outs that no op accepts."""
    yield ErrorCase(
        "out shape", (x,), op + "out must have the shape of x, [3, 8], got [3, 7]", {"out": torch.empty(3, 7)}
    )
    yield ErrorCase(
        "broadcast out",
        (x,),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8).expand(3, 8)},
    )
    yield ErrorCase(
        "out overlaps",
        (x[:2],),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": x[1:]},
    )
