"""The strides that an operator of the C ABI supports: one call per pattern.

For ops whose inputs and outputs may have any strides: torch's (transposed, sliced, expanded) and those that only a
descriptor can express (negative ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .c_ops import Described


def backwards(t: Tensor) -> Described:
    """View the memory of a contiguous tensor from its last element to its first."""
    return Described(t, tuple(t.shape), tuple(-stride for stride in t.stride()), t.numel() - 1)


def mirrored(t: Tensor) -> Described:
    """View the memory of a contiguous tensor, each row from its last element to its first."""
    return Described(t, tuple(t.shape), (*t.stride()[:-1], -1), t.shape[-1] - 1)


def mirrored_columns(t: Tensor) -> Described:
    """View the memory of a contiguous tensor by columns, each from its last element to its first."""
    steps = [-1, *(math.prod(t.shape[:dim]) for dim in range(1, t.dim()))]
    return Described(t, tuple(t.shape), tuple(steps), t.shape[0] - 1)


def last_dimension_first(t: Tensor) -> Tensor:
    """Copy the values to memory with the dimensions in reverse order: a matrix becomes column-major."""
    order = range(t.dim())[::-1]
    return t.permute(*order).contiguous().permute(*order)


def apart(t: Tensor) -> Tensor:
    """Copy the values so that they lie 3 elements apart in the last dimension, between others."""
    wide = torch.zeros(*t.shape[:-1], 3 * t.shape[-1]).to(t.dtype)
    wide[..., 1::3] = t
    return wide[..., 1::3]


def every_layout(args: Mapping[str, Any], outputs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Vary the strides of the tensors with the shape of the first output, which are contiguous in `args`."""
    shape = args[outputs[0]].shape
    alike = [key for key, value in args.items() if isinstance(value, Tensor) and value.shape == shape]
    inputs, written = [key for key in alike if key not in outputs], [key for key in alike if key in outputs]
    first, last, out = inputs[0], inputs[-1], outputs[0]

    def change(keys: Sequence[str], how: Callable[[Tensor], Tensor | Described]) -> dict[str, Any]:
        return {**args, **{key: how(args[key]) for key in keys}}

    yield "transposed input", change([first], last_dimension_first)
    yield "transposed outputs", change(written, last_dimension_first)
    yield "all transposed", change(alike, last_dimension_first)
    yield "strided input", change([last], apart)
    yield "strided outputs", change(written, apart)
    yield "strided outputs, transposed input", change(written, apart) | {first: last_dimension_first(args[first])}
    yield "strided input, transposed", change([first], lambda t: apart(t.mT.contiguous()).mT)
    yield "negative strides in", change([first], backwards)
    yield "negative strides out", change(written, mirrored)
    yield "negative strides, transposed", change([last], mirrored_columns)
    yield "negative strides", change(inputs, mirrored) | change(written, backwards)
    yield "one row for all", {**args, last: args[last][..., :1, :].expand(shape)}
    yield "one column for all", {**args, last: args[last][..., :1].expand(shape)}
    yield "one number for all", {**args, first: args[first].flatten()[:1].expand(shape)}
    yield "in place", {**args, out: args[first]}
    strided = change(alike, apart)
    yield "in place, strided", {**strided, out: strided[last]}
    transposed = change(alike, last_dimension_first)
    yield "in place, transposed", {**transposed, out: transposed[first]}
    if first != last:
        yield "one tensor twice", {**args, last: args[first]}
