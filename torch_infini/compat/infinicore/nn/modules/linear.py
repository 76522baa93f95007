"""Linear: a layer with a weight and an optional bias."""

from __future__ import annotations

from ...device import device as Device
from ...dtype import dtype as DataType
from ...dtype import float32
from ...tensor import Tensor, empty
from .. import functional
from ..parameter import Parameter
from .module import Module


class Linear(Module):
    """input @ weight.T + bias; the parameters are uninitialized.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the result's last dimension.
        bias: Whether there is a bias. Unlike torch's, the default is False.
        device: The parameters' device; None: the CPU.
        dtype: The parameters' dtype; None: float32.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Device | str | None = None,
        dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        place, kind = device or Device("cpu"), dtype or float32
        self.weight = Parameter(empty([out_features, in_features], dtype=kind, device=place))
        self.register_parameter("bias", Parameter(empty([out_features], dtype=kind, device=place)) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., out_features] from [..., in_features]."""
        return functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
