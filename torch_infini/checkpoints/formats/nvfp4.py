"""NVFP4: FP4 (E2M1) times a scale (E4M3) for each 16 columns, times a factor of the tensor; and modelopt's folders.

linear_blocks takes weights of a multiple of 128 columns; others are dequantized. Activations keep their dtype, and the
cache of keys and values its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._blocks import KINDS
from ...ops._blocks.ggml import fp4
from ..method import Fields, Method
from ..weight import (
    FLOATS,
    Dim,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    by_group,
    columns_in,
    dense_weight,
    groups_of,
    not_finite,
    rows_in,
)
from .fp8 import Float8

KIND = KINDS["nvfp4"]
SIZE = 16  # columns with one scale
_ONE = ((Dim(1),), ())
# Of activations and the cache.
_UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class NVFP4(StoredFormat):
    """q * float32(scale * factor), with two neighbours' q in a byte, the first in its lower half.

    Attributes:
        packed: The name of the tensor of bytes.
        factor: The name of the tensor's factor.
        divides: Whether that is what scales are divided by.
        name: compressed-tensors nvfp4-pack-quantized or modelopt NVFP4.
    """

    packed: str = "weight_packed"
    factor: str = "weight_global_scale"
    divides: bool = True
    name: str = "compressed-tensors nvfp4-pack-quantized"
    scales: str = "weight_scale"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, pairs = shapes[self.packed]
        return n, 2 * pairs

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups_of(k, SIZE)
        return {
            self.packed: Expected(((rows_in(n), columns_in(k, 2)),), (torch.uint8,)),
            "weight_scale": Expected(((rows_in(n), columns_in(k, SIZE)),), (torch.float8_e4m3fn,)),
            self.factor: Expected(_ONE, (torch.float32,)),
            **{name: Expected(_ONE, FLOATS, optional=True) for name in _UNUSED},
        }

    def checked_tensors(self) -> tuple[str, ...]:
        return self.scales, self.factor

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        factor = tensors[self.factor]
        if self.divides and not factor.all():
            return self.factor, "not be 0", "0"
        return not_finite(self.factor, factor) or not_finite(self.scales, tensors[self.scales].float())

    def _factor(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return what scales are multiplied by, in float32."""
        factor = tensors[self.factor].reshape(())
        return 1 / factor if self.divides else factor

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        packed, scales = tensors[self.packed][rows], tensors["weight_scale"][rows].float()
        q = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        return fp4(q) * by_group(scales * self._factor(tensors), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        if k % KIND.elements or not target.takes_blocks:
            return dense_weight(self, tensors, n, k, target.dtype)
        blocks = torch.empty(n, k // KIND.elements, KIND.bytes, dtype=torch.uint8)
        blocks[..., :4] = self._factor(tensors).view(1).view(torch.uint8)
        blocks[..., 4:12] = tensors["weight_scale"].view(torch.uint8).unflatten(1, (-1, 8))
        # A block's byte has the elements i and i + 16 of 32.
        pairs = tensors[self.packed].unflatten(1, (-1, 4, 2, 8))
        q = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        blocks[..., 12:] = (q[..., 0, :] | q[..., 1, :] << 4).flatten(-2)
        return LinearWeight(KIND.name, blocks)


_MIXED = "MIXED_PRECISION"  # quant_algo of a model whose layers have their own
_MODELOPT = NVFP4("weight", "weight_scale_2", False, "modelopt NVFP4")


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    """Of NVIDIA ModelOpt: the config's entry, or the file of its own, where the same is an object inside."""
    if fields["quantization"] is not None:
        fields = fields.inside("quantization")
    if fields["quant_algo"] != _MIXED:
        format = _format(fields, ("NVFP4", "FP8", _MIXED))
        return lambda name: format
    layers = fields.inside("quantized_layers")
    formats = {name: _format(layers.inside(name), ("NVFP4", "FP8")) for name in layers.config}

    def of(name: str) -> StoredFormat:
        if name not in formats:
            raise layers.fault("", f"have {name}, whose weight is quantized", [*formats][:5])
        return formats[name]

    return of


def _format(fields: Fields, known: tuple[str, ...]) -> StoredFormat:
    algorithm = fields.one_of("quant_algo", known)
    if algorithm == "NVFP4" and fields["group_size"] not in (None, SIZE):
        raise fields.fault("group_size", f"be {SIZE} for NVFP4", fields["group_size"])
    return _MODELOPT if algorithm == "NVFP4" else Float8(name="modelopt FP8")


METHODS = (Method("modelopt", ("weight_scale", "weight_scale_2"), _parse, file="hf_quant_config.json"),)
