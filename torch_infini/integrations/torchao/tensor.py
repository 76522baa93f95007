"""InfiniTensor: the weight of a linear layer in a format of torch_infini.weights, as a tensor subclass of torchao's.

It compiles, exports, moves between devices and is saved as torchao's own are: a wrapper of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from ... import weights
from ...weights import Integers

_NAME = "torch_infini.integrations.torchao.InfiniTensor"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class InfiniTensor(TorchAOBaseTensor):
    """A weight [n, k] in one of this library's formats.

    `torch.nn.functional.linear` multiplies by it with the format's op; dequantize() returns what it stands for. Other
    ops but those that copy, move or save it raise NotImplementedError. It has no gradient, and none passes through it.
    A row of the product has the same bits in any batch.

    Attributes:
        qdata: The integers, as the format stores them.
        scale, zero_point: The format's other tensors; None if it has none. These are the names in torchao's own
            tensors, by which transformers finds them in a checkpoint.
        format_name: The format, a key of torch_infini.weights.FORMATS.
        full_shape: (n, k).
        full_dtype: The dtype of activations that it was made for, which is the tensor's own dtype.
    """

    tensor_data_names = ["qdata"]
    optional_tensor_data_names = ["scale", "zero_point"]
    tensor_attribute_names = ["format_name", "full_shape", "full_dtype"]

    qdata: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    format_name: str
    full_shape: tuple[int, int]
    full_dtype: torch.dtype

    def __new__(
        cls,
        qdata: Tensor,
        format_name: str,
        full_shape: Sequence[int],
        full_dtype: torch.dtype,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> InfiniTensor:
        made: InfiniTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(full_shape), dtype=full_dtype, device=qdata.device, requires_grad=False
        )
        return made

    def __init__(
        self,
        qdata: Tensor,
        format_name: str,
        full_shape: Sequence[int],
        full_dtype: torch.dtype,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point
        self.format_name, self.full_shape, self.full_dtype = format_name, (full_shape[0], full_shape[1]), full_dtype

    @classmethod
    def quantized(cls, weight: Tensor, name: str) -> InfiniTensor:
        """Quantize a weight.

        Args:
            weight: [n, k], float32, bfloat16 or float16.
            name: One of torch_infini.weights.names(): "int8", "int4", or one format's own name.

        Returns:
            The quantized weight, on the same device.

        Raises:
            TypeError: For a weight of another type or dtype.
            ValueError: For an unknown name, a weight of other than two dimensions, on meta or whose columns do not fit
                the format, or one with infinity or NaN.
        """
        if isinstance(weight, TorchAOBaseTensor) or weight.dtype not in DTYPES:
            came = type(weight).__name__ if isinstance(weight, TorchAOBaseTensor) else weight.dtype
            raise TypeError(f"{_NAME}: weight must be dense, of float32, bfloat16 or float16, got {came}")
        if weight.dim() != 2:
            raise ValueError(f"{_NAME}: weight must have 2 dimensions, got {weight.dim()}")
        if weight.is_meta:
            raise ValueError(f"{_NAME}: weight must have values, got one on meta: load the model before quantize_")
        form = weights.best(name, weight.device)
        n, k = weight.shape
        with torch.no_grad():
            new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=weight.device)  # noqa: E731
            to = form.empty(n, k, form.group(k), weight.dtype, new)
            form.quantize(weight.detach(), to)
        return cls(to.weight, form.name, (n, k), weight.dtype, to.scales, to.zeros)

    def integers(self) -> Integers:
        return Integers(self.qdata, self.scale, self.zero_point)

    def dequantize(self) -> Tensor:
        """Return the weight in full precision: [n, k], of full_dtype, a copy."""
        n, k = self.full_shape
        return weights.FORMATS[self.format_name].dequantize(self.integers(), 0, n, k, self.full_dtype)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph depends on, by which torch keeps compiled graphs on disk."""
        given = [None if x is None else (tuple(x.shape), x.dtype) for x in self.integers()]
        return repr((self.format_name, self.full_shape, self.full_dtype, given))

    def __repr__(self) -> str:
        return f"InfiniTensor({self.format_name}, {list(self.full_shape)}, {self.full_dtype}, {self.device})"


Arguments = tuple[Any, ...]


# The last is what the compiler backend "infini" makes of linear layers.
@InfiniTensor.implements_torch_function([torch.nn.functional.linear])
@InfiniTensor.implements([torch.ops.aten.linear.default, torch.ops.infini.linear.default])
def _linear(func: Callable[..., Any], types: Any, args: Arguments, kwargs: Mapping[str, Any] | None) -> Tensor:
    x, weight, *rest = args
    bias = rest[0] if rest else (kwargs or {}).get("bias")
    if not isinstance(weight, InfiniTensor):
        raise NotImplementedError(f"{_NAME}: x and bias must be plain tensors, got one of these")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"{_NAME}: x must not require a gradient, because a quantized weight passes none, got one")
    return weights.FORMATS[weight.format_name].product(x, weight.integers(), bias, True, None)


@InfiniTensor.implements([torch.ops.aten._to_copy.default])
def _to_copy(func: Callable[..., Any], types: Any, args: Arguments, kwargs: Mapping[str, Any] | None) -> InfiniTensor:
    """Copy to a device or dtype; scales and zeros that have the dtype of activations follow it."""
    self, given = args[0], dict(kwargs or {})
    dtype, device = given.get("dtype") or self.full_dtype, given.get("device") or self.device
    if dtype not in DTYPES:
        raise TypeError(f"{_NAME}: dtype must be float32, bfloat16 or float16, got {dtype}")
    blocking = given.get("non_blocking", False)

    def moved(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        own = dtype if x.dtype == self.full_dtype and x.dtype != torch.float32 else x.dtype
        return x.to(device, own, non_blocking=blocking, copy=True)

    qdata = moved(self.qdata)
    assert qdata is not None
    return InfiniTensor(qdata, self.format_name, self.full_shape, dtype, moved(self.scale), moved(self.zero_point))


torch.serialization.add_safe_globals([InfiniTensor])
# save_pretrained writes the tensors whose classes these name.
with suppress(ImportError):  # a prototype of torchao's, which may move
    from torchao.prototype.safetensors import safetensors_utils

    safetensors_utils.ALLOWED_CLASSES[InfiniTensor.__name__] = InfiniTensor
    safetensors_utils.ALLOWED_TENSORS_SUBCLASSES.append(InfiniTensor.__name__)
