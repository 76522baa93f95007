"""rms_norm: root mean square normalisation over the last dimension, with a scale for each column.

The kernel is csrc/infiniop/rms_norm; add_rms_norm shares it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .silu import widened

# Where the value is rounded to the dtype of x; the numbers are the op schema's.
ROUNDINGS = {"once": 0, "llama": 1, "gemma": 2, "wide_once": 3, "wide_llama": 4, "wide_gemma": 5}


def rounding_number(op: str, rounding: str) -> int:
    """Return the schema's number for a rounding mode; ValueError for an unknown name."""
    if rounding not in ROUNDINGS:
        names = ", ".join(repr(name) for name in ROUNDINGS)
        raise ValueError(f"infini::{op}: rounding must be one of {names}, got {rounding!r}")
    return ROUNDINGS[rounding]


def order_of(rounding: int) -> int:
    """Return the number of "once", "llama" or "gemma" for a mode with a wide sum too."""
    return rounding % 3


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: str = "once", *, out: Tensor | None = None
) -> Tensor:
    """Normalize the rows of x by their root mean square and scale the columns.

    y = x / sqrt(mean(x^2) + eps) * weight, in float32; `rounding` says where the value is rounded to the dtype of x.

    Args:
        x: [..., n] float32, bfloat16, float16 or float64; stride 1 in the last dimension, any other strides.
        weight: [n], of x's dtype; for a half type also float32, and with "once" the other half type.
        eps: Added to the mean of squares; at least 0.
        rounding: "once": at the end (Infini, Olmo 2). "llama": before the product with weight, as in Hugging Face's
            Llama, Mistral and Qwen; a float32 weight then gives a float32 result. "gemma": at the end, with the scale 1
            + weight. "wide_once", "wide_llama" and "wide_gemma": the same here; in add_rms_norm, of a sum that is
            not rounded.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        [..., n], contiguous; of x's dtype, or float32 (see "llama").

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or a negative or NaN eps.
        ValueError: For an unknown rounding.

    Equivalent to:
        >>> x32 = x.float()
        >>> y = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467.
    """
    number = rounding_number("rms_norm", rounding)
    op = torch.ops.infini.rms_norm
    return op.default(x, weight, eps, number) if out is None else op.out(x, weight, eps, number, out=out)


def output_dtype(x: Tensor, weight: Tensor, rounding: int) -> torch.dtype:
    return weight.dtype if order_of(rounding) == ROUNDINGS["llama"] else x.dtype


def fake(x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Tensor:
    return x.new_empty(x.shape, dtype=output_dtype(x, weight, rounding))


def decomposition(x: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Tensor:
    return of_wide(widened(x), x.dtype, weight, eps, order_of(rounding))


def of_wide(wide: Tensor, dtype: torch.dtype, weight: Tensor, eps: float, order: int) -> Tensor:
    """Compute rms_norm of a tensor of `dtype` that is widened, in one of the first three modes."""
    value = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if order == ROUNDINGS["llama"]:
        return (value.to(dtype) * weight).contiguous()  # half types: multiplied in float32, rounded once
    scale = weight.to(wide.dtype)
    if order == ROUNDINGS["gemma"]:
        scale = 1 + scale
    return (value * scale).to(dtype).contiguous()


SPEC = OpSpec(
    rms_norm,
    schema="(Tensor x, Tensor weight, float eps=1e-6, int rounding=0) -> Tensor",
    fake=fake,
    inplace="x",
    decomposition=decomposition,
)
