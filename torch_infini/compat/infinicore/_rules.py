"""Which calls of torch's functions our kernels serve: a single table, RULES, by name, dtypes and arguments.

A rule's function takes torch's arguments and returns NotImplemented if our op would not do what torch does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import ops as infini

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WITH_DOUBLE = (*FLOATS, torch.float64)
MAX_DIMS = 8  # the most that our kernels support
COPIED = (*WITH_DOUBLE, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Rule:
    """Our op for a torch function.

    Attributes:
        function: Takes torch's arguments without out; returns the result or NotImplemented.
        op: torch.ops.infini.<op>.
        where: The conditions on the arguments, in words.
        dtypes: Of the first tensor. All floating-point tensors of a call must have the same dtype, and all tensors must
            be non-empty, on one device and have at most MAX_DIMS dimensions.
    """

    function: Callable[..., Any]
    op: str
    where: str
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors or tensors[0].dtype not in self.dtypes:
            return False
        first = tensors[0]
        return all(
            t.device == first.device
            and (t.dtype == first.dtype or not t.dtype.is_floating_point)
            and t.numel()
            and t.dim() <= MAX_DIMS
            for t in tensors
        )


def is_dim(dim: Any, input: Tensor) -> bool:
    """Return whether it is a valid dimension of a tensor."""
    return isinstance(dim, int) and -input.dim() <= dim < input.dim()


def softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> Any:
    return infini.softplus(input) if beta == 1 and threshold == 20 else NotImplemented


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if dim is None or not is_dim(dim, input) or dtype not in (None, input.dtype):
        return NotImplemented
    return infini.log_softmax(input, dim)


def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if dim is None or not is_dim(dim, input) or dtype not in (None, input.dtype):
        return NotImplemented
    return infini.softmax(-input, dim)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Any:
    # Our op adds eps to the norm, torch takes the maximum of both: equal in float16, whose least norm is 6e-8.
    if not is_dim(dim, input) or not 0 < eps <= 1e-12 or not (1 <= p < 2**31 and p == int(p)):
        return NotImplemented
    return infini.lp_norm(input, int(p), dim, eps)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    largest = torch.finfo(input.dtype).max
    if not -largest <= min_val <= max_val <= largest:
        return NotImplemented
    return infini.clip(input, min_val, max_val, out=input if inplace else None)


def relu6(input: Tensor, inplace: bool = False) -> Any:
    return infini.clip(input, 0.0, 6.0, out=input if inplace else None)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not query.dim() == key.dim() == value.dim() == 4 or dropout_p or key.shape != value.shape:
        return NotImplemented
    batch, heads, length, size = query.shape
    if key.shape[0] != batch or key.shape[3] != size or any(t.stride(3) != 1 for t in (query, key, value)):
        return NotImplemented
    if heads != key.shape[1] and not (enable_gqa and heads % key.shape[1] == 0):
        return NotImplemented
    # torch aligns the causal mask at the first key, our kernel at the last: equal for equal lengths.
    if is_causal and (attn_mask is not None or length != key.shape[2]):
        return NotImplemented
    if scale is not None and not math.isfinite(scale):
        return NotImplemented
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, query.dtype) or attn_mask.dim() not in (2, 4):
            return NotImplemented
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return infini.attention(q, k, v, attn_mask, None, is_causal, scale).transpose(1, 2)


def conv(spatial: int) -> Callable[..., Any]:
    """Make the rule's function for this many spatial dimensions."""

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if (
            groups != 1
            or isinstance(padding, str)
            or weight.dim() != spatial + 2
            or input.dim() - spatial not in (1, 2)
        ):
            return NotImplemented
        return infini.conv(input, weight, bias, stride, padding, dilation)

    return function


def mv(input: Tensor, vec: Tensor) -> Any:
    if input.dim() != 2 or vec.dim() != 1:
        return NotImplemented
    return product(input, vec)


def dot(input: Tensor, tensor: Tensor) -> Any:
    if input.dim() != 1 or input.shape != tensor.shape:
        return NotImplemented
    return product(input, tensor)


def vdot(input: Tensor, other: Tensor) -> Any:
    return dot(input, other)


def inner(input: Tensor, other: Tensor) -> Any:
    if not input.dim() or other.dim() not in (1, 2) or input.shape[-1] != other.shape[-1]:
        return NotImplemented
    return product(input, other.mT if other.dim() == 2 else other)


def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if mat.dim() != 2 or vec.dim() != 1:
        return NotImplemented
    return product(mat, vec, input, alpha, beta)


def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if vec1.dim() != 1 or vec2.dim() != 1:
        return NotImplemented
    return product(vec1.unsqueeze(1), vec2.unsqueeze(0), input, alpha, beta)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if batch1.dim() != 3 or batch2.dim() != 3 or batch1.shape[0] != batch2.shape[0]:
        return NotImplemented
    return product(batch1, batch2, input, alpha, beta)


def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if batch1.dim() != 3 or batch2.dim() != 3 or batch1.shape[0] != batch2.shape[0]:
        return NotImplemented
    # The sum over the batch becomes part of the sum over k.
    rows = batch1.transpose(0, 1).flatten(1)
    return product(rows, batch2.flatten(0, 1), input, alpha, beta)


def product(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1, beta: float = 0) -> Any:
    """Compute alpha * a @ b + beta * c by gemm, if it supports their shapes, strides and numbers."""
    # Whether an alpha of 0 hides NaN in the product depends on torch's kernel, by function and dtype.
    if alpha == 0 or not all(isinstance(number, (int, float)) and math.isfinite(number) for number in (alpha, beta)):
        return NotImplemented
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else -1] or not (lies_in_rows_or_columns(a, b)):
        return NotImplemented
    shape = (*a.shape[:-1], *b.shape[-1:][: b.dim() - 1])
    if c is None:
        return infini.matmul(a, b)
    sizes = zip(reversed(c.shape), reversed(shape))
    if c.dim() > len(shape) or any(size not in (1, whole) for size, whole in sizes):
        return NotImplemented
    return infini.gemm(a, b, c, float(alpha), float(beta))


def lies_in_rows_or_columns(*matrices: Tensor) -> bool:
    return all(1 in matrix.stride()[-2:] for matrix in matrices)


def clone(input: Tensor, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    return infini.rearrange(input, out=torch.empty_like(input, memory_format=memory_format))


_PRODUCT = "each matrix lies by rows or columns and alpha is not 0"
_CONV = "groups is 1 and padding is numbers"
RULES = {
    "addbmm": Rule(addbmm, "gemm", _PRODUCT),
    "addmv": Rule(addmv, "gemm", _PRODUCT),
    "addr": Rule(addr, "gemm", _PRODUCT),
    "baddbmm": Rule(baddbmm, "gemm", _PRODUCT),
    "clone": Rule(clone, "rearrange", "no size is 0", COPIED),
    "dot": Rule(dot, "matmul", "both strides are 1"),
    "inner": Rule(inner, "matmul", "other has one or two dimensions and each matrix lies by rows or columns"),
    "mv": Rule(mv, "matmul", "each matrix lies by rows or columns"),
    "vdot": Rule(vdot, "matmul", "both strides are 1"),
    "nn.functional.conv1d": Rule(conv(1), "conv", _CONV),
    "nn.functional.conv2d": Rule(conv(2), "conv", _CONV),
    "nn.functional.conv3d": Rule(conv(3), "conv", _CONV),
    "nn.functional.hardtanh": Rule(hardtanh, "clip", "min_val is at most max_val, both finite", WITH_DOUBLE),
    "nn.functional.log_softmax": Rule(log_softmax, "log_softmax", "dim is given and dtype is not"),
    "nn.functional.normalize": Rule(normalize, "lp_norm", "p is whole and eps is at most 1e-12", (torch.float16,)),
    "nn.functional.relu6": Rule(relu6, "clip", "no size is 0", WITH_DOUBLE),
    "nn.functional.scaled_dot_product_attention": Rule(
        scaled_dot_product_attention,
        "attention",
        "all have 4 dimensions, key and value one shape, dropout_p is 0, and causal lengths are equal",
    ),
    "nn.functional.softmin": Rule(softmin, "softmax", "dim is given and dtype is not"),
    "nn.functional.softplus": Rule(softplus, "softplus", "beta is 1 and threshold 20", WITH_DOUBLE),
}


class Compute:
    """Return a function of torch tensors that calls our kernel if a rule applies, else torch's function."""

    def __init__(self, theirs: Callable[..., Any], rule: Rule | None) -> None:
        self.theirs = theirs
        self.rule = rule
        self.parameters = None if rule is None else inspect.signature(rule.function)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.rule is not None and self.parameters is not None:
            try:
                self.parameters.bind(*args, **kwargs)
            except TypeError:  # torch reports the error, or supports another form of the call
                return self.theirs(*args, **kwargs)
            if self.rule.fits(args, kwargs):
                result = self.rule.function(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return self.theirs(*args, **kwargs)
