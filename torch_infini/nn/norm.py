"""RMSNorm, alone, fused with the residual addition before it, or with an all-reduce before that.

The ops are infini::rms_norm, infini::add_rms_norm and infini::all_reduce_add_rms_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..distributed import TPGroup

ROUNDING = 1  # x is normalized and rounded before it is multiplied by the weight, as in Hugging Face's Llama


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Args:
        size: The size of the last dimension.
        eps: Added to the mean square.
        dtype: The weight's dtype.
        device: The weight's device.
        tp_group: The group whose ranks hold partial sums of the x passed to after(); None: x is complete.

    Equivalent to:
        >>> y = torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)  # but for the order of rounding
    """

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp_group: TPGroup | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalize x [..., size], in `out` if it is given, which may be x itself."""
        if out is not None:
            return torch.ops.infini.rms_norm.out(x, self.weight, self.eps, ROUNDING, out=out)
        return torch.ops.infini.rms_norm.default(x, self.weight, self.eps, ROUNDING)

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(residual + x), residual + x), shaped as x, in one pass; with a tp_group, all-reduce x first."""
        if self.tp_group is not None:
            return torch.ops.infini.all_reduce_add_rms_norm.default(
                x, residual, self.weight, self.eps, ROUNDING, self.tp_group.group
            )
        return torch.ops.infini.add_rms_norm.default(x, residual, self.weight, self.eps, ROUNDING)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
