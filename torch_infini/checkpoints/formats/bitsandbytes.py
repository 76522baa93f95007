"""bitsandbytes: NF4 and FP4 with a scale for each block of a flattened weight, and int8 with a scale for each row.

linear_blocks takes NF4 whose blocks lie within rows, without loss once double quantization of the scales is resolved.

Source: Dettmers et al., QLoRA, 2023 (NF4, double quantization); LLM.int8(), 2022.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._blocks import KINDS
from ...ops._blocks.floats import NF4
from ..method import NAME, Fields, Method, Reader
from ..weight import (
    Dim,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    columns_in,
    dense_weight,
    not_finite,
    rows_in,
)

KIND = KINDS["nf4"]
_FLOAT32, _BYTES = (torch.float32,), (torch.uint8,)
_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class FourBits(StoredFormat):
    """table[q] * absmax of the block; q two to a byte, the first in the upper half, of the weight's rows in sequence.

    With double quantization absmax is table[q] * absmax + offset, too, computed in float32.

    Attributes:
        kind: "nf4" or "fp4".
        n, k: The weight's shape.
        block: Elements with one scale.
        nested: Scales with one scale of theirs; 0: they are in float32.
        offset: What is added to them then.
        state: The bytes of the tensor that describes all this.
    """

    kind: str
    n: int
    k: int
    block: int
    nested: int = 0
    offset: float = 0.0
    state: int = 0

    @property
    def name(self) -> str:
        return f"bitsandbytes {self.kind}"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        shapes["weight"]  # KeyError without it
        return self.n, self.k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        if n * k % 2:
            raise ValueError(f"in_features must be even, as two elements are a byte, got {k}")
        # Rows can be cut where each has blocks, and scales, of its own.
        in_rows = k % self.block == 0
        blocks = Dim(n * k // self.block, "rows", 1, k // self.block) if in_rows else Dim(-(-n * k // self.block))
        found = {
            "weight": Expected(((Dim(n * k // 2, "rows", 1, k // 2), Dim(1)),), _BYTES),
            "weight.absmax": Expected(((blocks,),), _BYTES if self.nested else _FLOAT32),
            "weight.quant_map": Expected(((Dim(16),),), _FLOAT32),
            f"{_STATE}{self.kind}": Expected(((Dim(self.state),),), _BYTES),
        }
        if self.nested:
            found["weight.nested_absmax"] = Expected(((Dim(-(-blocks.entries // self.nested)),),), _FLOAT32)
            found["weight.nested_quant_map"] = Expected(((Dim(256),),), _FLOAT32)
        return found

    @property
    def scales(self) -> str:
        return "weight.nested_absmax" if self.nested else "weight.absmax"

    def checked_tensors(self) -> tuple[str, ...]:
        maps = ("weight.quant_map", *(("weight.nested_quant_map",) if self.nested else ()))
        return (self.scales, *maps)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return next((fault for name in self.checked_tensors() if (fault := not_finite(name, tensors[name]))), None)

    def _absmax(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scales of all blocks in float32."""
        stored = tensors["weight.absmax"]
        if not self.nested:
            return stored
        of_scale = tensors["weight.nested_absmax"].repeat_interleave(self.nested)[: len(stored)]
        return tensors["weight.nested_quant_map"][stored.long()] * of_scale + self.offset

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        count = n - first if count < 0 else count
        begin, end = first * k, (first + count) * k
        packed = tensors["weight"].flatten()[begin // 2 : -(-end // 2)]
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[begin % 2 :][: end - begin]
        values = tensors["weight.quant_map"].double()[codes.long()]
        blocks = torch.arange(begin, end) // self.block
        return (values * self._absmax(tensors).double()[blocks]).view(count, k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        is_nf4 = torch.equal(tensors["weight.quant_map"], torch.tensor(NF4))
        in_blocks = k % self.block == 0 and self.block % KIND.elements == 0
        if not (target.takes_blocks and is_nf4 and in_blocks):
            return dense_weight(self, tensors, n, k, target.dtype)
        scales = self._absmax(tensors).repeat_interleave(self.block // KIND.elements)
        blocks = torch.empty(n, k // KIND.elements, KIND.bytes, dtype=torch.uint8)
        blocks[..., :4] = scales.view(n, -1, 1).view(torch.uint8)
        blocks[..., 4:] = tensors["weight"].view(n, -1, KIND.elements // 2)
        return LinearWeight(KIND.name, blocks)


class EightBits(StoredFormat):
    """q * SCB / 127 with a scale for each row. x keeps its dtype here; bitsandbytes quantizes it but for outliers."""

    name = "bitsandbytes int8"
    scales = "SCB"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        return {
            "weight": Expected(((rows_in(n), columns_in(k)),), (torch.int8,)),
            "SCB": Expected(((rows_in(n),),), _FLOAT32),
            # 0 for rows as they are; tiles for the products of some GPUs have other numbers.
            "weight_format": Expected(((), (Dim(1),)), _BYTES, optional=True),
        }

    def checked_tensors(self) -> tuple[str, ...]:
        return "SCB", "weight_format"

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        layout = tensors.get("weight_format")
        if layout is not None and layout.any():
            return "weight_format", "be 0, rows as they are", f"{int(layout.max())}"
        return not_finite("SCB", tensors["SCB"])

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        return tensors["weight"][rows].double() * (tensors["SCB"][rows] / 127).double()[:, None]

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        return LinearWeight("int8", tensors["weight"], tensors["SCB"] / 127)


def _split(name: str) -> tuple[str, str]:
    """Return a tensor's layer and the rest of its name: those of a weight's scales begin with the weight's."""
    layer, found, rest = name.partition(".weight.")
    if found:
        return layer, f"weight.{rest}"
    layer, _, last = name.rpartition(".")
    return layer, last


def _parse(fields: Fields, read: Reader) -> Callable[[str], StoredFormat]:
    four, eight = (fields.one_of(f"load_in_{bits}bit", (True, False), False) for bits in (4, 8))
    if four == eight:
        raise fields.fault("load_in_4bit", "be true where load_in_8bit is false, and the reverse", four)
    if eight:
        return lambda name: EightBits()
    kind = fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    if fields.one_of("bnb_4bit_quant_storage", ("uint8", "float16", "bfloat16", "float32"), "uint8") != "uint8":
        raise fields.unsupported("bnb_4bit_quant_storage", "a storage dtype other than uint8")
    return lambda name: _with_state(name, kind, read)


def _with_state(name: str, kind: str, read: Reader) -> FourBits:
    """Return the format of a layer, whose shape and blocks its quant_state names: JSON in a tensor of bytes."""
    at = f"{name}.{_STATE}{kind}"
    try:
        stored = read(at).flatten()
        state = json.loads(bytes(stored.tolist()))
        n, k = state["shape"]
        sizes = n, k, state["blocksize"], state.get("nested_blocksize", 0)
        if state["quant_type"] != kind or not all(type(size) is int and size >= 0 for size in sizes) or sizes[2] < 1:
            raise ValueError(f"{state}")
        return FourBits(kind, *sizes, float(state.get("nested_offset", 0.0)), len(stored))
    except KeyError as missing:
        raise ValueError(f"{NAME}: {at} must have shape, blocksize and quant_type, got none of {missing}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME}: {at} must be the JSON of a quantized {kind} weight, got {error}") from None


METHODS = (Method("bitsandbytes", ("weight.absmax", "SCB"), parse_reading=_parse, split=_split),)
