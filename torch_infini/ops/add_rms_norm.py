"""add_rms_norm: the residual addition and the normalization that follows it in every transformer layer, in one pass.

The kernel is csrc/infiniop/rms_norm, shared with rms_norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec
from .rms_norm import ROUNDINGS, of_wide, order_of, output_dtype, rounding_number
from .silu import widened


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    rounding: str = "once",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalize the sum.

    h = x + residual, rounded to the dtype of x; y = rms_norm(h, weight, eps, rounding). With "wide_once", "wide_llama"
    or "wide_gemma" y is the norm of the sum in float32, before it is rounded to h.

    Args:
        x: [..., n] float32, bfloat16, float16 or float64: the layer's output. Stride 1 in the last dimension.
        residual: [..., n], dtype of x: the residual stream.
        weight: [n], of x's dtype; for a half type also float32, and with "once" the other half type.
        eps: Added to the mean of squares; at least 0.
        rounding: "once", "llama" or "gemma"; see rms_norm. "wide_llama" is the order of vLLM's RMSNorm.forward_native,
            "wide_once" that of engines whose kernel keeps the sum in registers, such as FlashInfer's.
        out: (y, h), written and returned; either may be x or residual itself, but y and h must be distinct.

    Returns:
        (y, h): the normalized value and the new residual, both [..., n] and contiguous.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, or a negative or NaN eps.
        ValueError: For an unknown rounding.

    Equivalent to:
        With "wide_llama":
        >>> s = x.float() + residual.float()
        >>> h = s.to(x.dtype)
        >>> y = (s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

        With "once", "llama" and "gemma":
        >>> h = x + residual
        >>> y, h = torch_infini.ops.rms_norm(h, weight, eps, rounding), h

    Source: the pre-norm transformer layer as in Touvron et al., LLaMA, 2023, arXiv:2302.13971.
    """
    number = rounding_number("add_rms_norm", rounding)
    if out is None:
        return torch.ops.infini.add_rms_norm.default(x, residual, weight, eps, number)
    return torch.ops.infini.add_rms_norm.out(x, residual, weight, eps, number, out0=out[0], out1=out[1])


def fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0, *group: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=output_dtype(x, weight, rounding)), x.new_empty(x.shape)


def decomposition(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    wide = widened(x) + widened(residual)
    h = wide.to(x.dtype).contiguous()
    if rounding < ROUNDINGS["wide_once"]:
        wide = widened(h)
    return of_wide(wide, x.dtype, weight, eps, order_of(rounding)), h


SPEC = OpSpec(
    add_rms_norm,
    schema="(Tensor x, Tensor residual, Tensor weight, float eps=1e-6, int rounding=0) -> (Tensor, Tensor)",
    fake=fake,
    decomposition=decomposition,
)
