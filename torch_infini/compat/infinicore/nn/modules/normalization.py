"""RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

from ..._arguments import sizes
from ...device import device as Device
from ...dtype import dtype as DataType
from ...dtype import float32
from ...tensor import Tensor, empty
from .. import functional
from ..parameter import Parameter
from .module import Module


class RMSNorm(Module):
    """RMS norm over the last dimension, times a weight; the weight is uninitialized.

    Args:
        normalized_shape: Size of the last dimension, as a number or a list of one.
        eps: Added to the mean of squares.
        elementwise_affine: Must be true.
        device: The weight's device; None: the CPU.
        dtype: The weight's dtype; None: float32.
    """

    weight: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Device | str | None = None,
        dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        if not elementwise_affine:
            raise AssertionError("infinicore.nn.RMSNorm: elementwise_affine must be True, got False")
        self.normalized_shape = sizes(normalized_shape, "infinicore.nn.RMSNorm", "normalized_shape")
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight = Parameter(empty(self.normalized_shape, dtype=dtype or float32, device=device or Device("cpu")))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the norm of [..., d], with the same shape."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"
