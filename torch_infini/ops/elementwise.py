"""The elementwise ops that torch has under the same names: add, sub, mul, clip, the activations, ones and zeros.

One kernel, csrc/infiniop/elementwise, serves all of them, silu, swiglu, geglu and the C ABI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec, like_first
from .silu import widened


def run(op: torch._ops.OpOverloadPacket, *args: Any, out: Tensor | None) -> Tensor:
    return op.default(*args) if out is None else op.out(*args, out=out)


def add(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Add two tensors, broadcast to each other.

    y = x + other, in float32, rounded once; float64 in double, integers wrap around. torch.ops.infini.add_(x, other)
    overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16, float64, int32 or int64.
        other: Of x's dtype and a shape that broadcasts with x's.
        out: Written and returned instead of a new tensor; may be x or other itself.

    Returns:
        The broadcast shape, contiguous; of x's dtype.

    Raises:
        RuntimeError: For unsupported dtypes or shapes, or an out that is broadcast or overlaps an input.

    Equivalent to:
        >>> y = torch.add(x, other)

    Source: torch.add, whose broadcasting this follows.
    """
    return run(torch.ops.infini.add, x, other, out=out)


def sub(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Subtract a tensor from another, broadcast to each other.

    y = x - other, in float32, rounded once; float64 in double. torch.ops.infini.sub_(x, other) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        other: Of x's dtype and a shape that broadcasts with x's.
        out: Written and returned instead of a new tensor; may be x or other itself.

    Returns:
        The broadcast shape, contiguous; of x's dtype.

    Raises:
        RuntimeError: For unsupported dtypes or shapes, or an out that is broadcast or overlaps an input.

    Equivalent to:
        >>> y = torch.sub(x, other)

    Source: torch.sub, whose broadcasting this follows.
    """
    return run(torch.ops.infini.sub, x, other, out=out)


def mul(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply two tensors element by element, broadcast to each other.

    y = x * other, in float32, rounded once; float64 in double. torch.ops.infini.mul_(x, other) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        other: Of x's dtype and a shape that broadcasts with x's.
        out: Written and returned instead of a new tensor; may be x or other itself.

    Returns:
        The broadcast shape, contiguous; of x's dtype.

    Raises:
        RuntimeError: For unsupported dtypes or shapes, or an out that is broadcast or overlaps an input.

    Equivalent to:
        >>> y = torch.mul(x, other)

    Source: torch.mul, whose broadcasting this follows.
    """
    return run(torch.ops.infini.mul, x, other, out=out)


def clip(x: Tensor, min: float | None = None, max: float | None = None, *, out: Tensor | None = None) -> Tensor:
    """Clamp each element between two numbers.

    y = x, but at least min and at most max. NaN in x is kept. torch.ops.infini.clip_(x, min, max) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        min: The least result, rounded to x's dtype (infinity if out of its range); None: no bound. If it is NaN, all
            results are NaN.
        max: The largest result, like min; if min is larger, all results are max.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.clip(x, -torch.inf if min is None else min, max)

    Source: torch.clip, whose rules for NaN and crossed bounds these are.
    """
    return run(torch.ops.infini.clip, x, min, max, out=out)


def relu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Replace negative elements by 0.

    y = max(x, 0); NaN is kept. torch.ops.infini.relu_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.relu(x)

    Source: Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines, ICML 2010.
    """
    return run(torch.ops.infini.relu, x, out=out)


def gelu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each element by the normal distribution function at it.

    y = x / 2 * (1 + erf(x / sqrt(2))), the exact form, not its approximation by tanh; in float32, rounded once;
    float64 in double. torch.ops.infini.gelu_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous. Minus infinity gives NaN, as the formula and torch do.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.nn.functional.gelu(x)

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, arXiv:1606.08415.
    """
    return run(torch.ops.infini.gelu, x, out=out)


def sigmoid(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Map each element to (0, 1) by the logistic function.

    y = 1 / (1 + exp(-x)), in float32, rounded once; float64 in double. torch.ops.infini.sigmoid_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.sigmoid(x)

    Source: torch.sigmoid; the logistic function.
    """
    return run(torch.ops.infini.sigmoid, x, out=out)


def tanh(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Take the hyperbolic tangent of each element.

    y = tanh(x), in float32, rounded once; float64 in double. torch.ops.infini.tanh_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.tanh(x)

    Source: torch.tanh.
    """
    return run(torch.ops.infini.tanh, x, out=out)


def softplus(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Take the logarithm of 1 + e^x of each element, a smooth form of relu.

    y = log(1 + exp(x)), and x itself above 20 (torch's beta of 1 and threshold of 20); in float32, rounded once;
    float64 in double. torch.ops.infini.softplus_(x) overwrites x.

    Args:
        x: Any shape and strides; float32, bfloat16, float16 or float64.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or dtype, broadcast or overlapping x.

    Equivalent to:
        >>> y = torch.nn.functional.softplus(x)

    Source: Dugas et al., Incorporating Second-Order Functional Knowledge for Better Option Pricing, NIPS 2000.
    """
    return run(torch.ops.infini.softplus, x, out=out)


def ones(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Make a tensor of ones in the shape of another.

    y = 1. torch.ops.infini.ones_(x) overwrites x.

    Args:
        x: Only its shape and dtype matter: float16 to float64, bfloat16, bool or an integer of 8 to 64 bits.
        out: Written and returned instead of a new tensor, in its own dtype and with any strides; may share x's memory.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or that is broadcast.

    Equivalent to:
        >>> y = torch.ones_like(x)

    Source: torch.ones_like.
    """
    return run(torch.ops.infini.ones, x, out=out)


def zeros(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Make a tensor of zeros in the shape of another.

    y = 0. torch.ops.infini.zeros_(x) overwrites x.

    Args:
        x: Only its shape and dtype matter: float16 to float64, bfloat16, bool or an integer of 8 to 64 bits.
        out: Written and returned instead of a new tensor, in its own dtype and with any strides; may share x's memory.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported dtype, or an out of other shape or that is broadcast.

    Equivalent to:
        >>> y = torch.zeros_like(x)

    Source: torch.zeros_like.
    """
    return run(torch.ops.infini.zeros, x, out=out)


def gelu_in_aten(x: Tensor) -> Tensor:
    """Compute gelu by erf, as eager torch does: erfc would keep small results below -5, but takes 7 times as long."""
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


def held_bound(dtype: torch.dtype, bound: float | None, none: float) -> float:
    """Return a bound for torch.clip: infinity if it is out of the dtype's range, which torch.clip rejects."""
    if bound is None:
        return none
    return bound if abs(bound) <= torch.finfo(dtype).max else bound * torch.inf


def clip_in_aten(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return torch.clip(x, held_bound(x.dtype, min, -torch.inf), held_bound(x.dtype, max, torch.inf))


def clip_decomposition(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return clip_in_aten(widened(x), min, max).to(x.dtype).contiguous()


def unary(function: Callable[..., Tensor], aten: Callable[..., Tensor]) -> OpSpec:
    """Make the spec of an op with one input; aten: the same in torch's ops, for the compiler."""
    decomposition = lambda x: aten(widened(x)).to(x.dtype).contiguous()
    return OpSpec(function, fake=like_first, inplace="x", decomposition=decomposition)


def binary(function: Callable[..., Tensor], aten: Callable[..., Tensor]) -> OpSpec:
    """Make the spec of an op with two inputs that are broadcast to each other."""
    return OpSpec(
        function,
        fake=lambda x, other: x.new_empty(torch.broadcast_shapes(x.shape, other.shape)),
        inplace="x",
        decomposition=lambda x, other: aten(widened(x), widened(other)).to(x.dtype).contiguous(),
    )


def fill(function: Callable[..., Tensor], value: float) -> OpSpec:
    """Make the spec of an op that fills a tensor with one value."""
    return OpSpec(function, fake=like_first, inplace="x", decomposition=lambda x: x.new_full(x.shape, value))


SPECS = (
    binary(add, torch.add),
    binary(sub, torch.sub),
    binary(mul, torch.mul),
    OpSpec(clip, fake=like_first, inplace="x", decomposition=clip_decomposition),
    unary(relu, torch.relu),
    unary(gelu, gelu_in_aten),
    unary(sigmoid, torch.sigmoid),
    unary(tanh, torch.tanh),
    unary(softplus, torch.nn.functional.softplus),
    fill(ones, 1),
    fill(zeros, 0),
)
