"""compressed-tensors: its description, and the formats pack-quantized and int-quantized, whose integers ops multiply.

float-quantized is Float8 (fp8.py), mxfp4-pack-quantized MXFP4 (mxfp4.py), nvfp4-pack-quantized NVFP4 (nvfp4.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..method import Fields, Method
from ..weight import (
    FLOATS,
    Dim,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    by_group,
    by_row,
    columns_in,
    dense_weight,
    groups_of,
    int4_group,
    int4_weight,
    nibbles,
    pack_nibbles,
    rows_in,
    signed,
    whole_words,
)
from .fp8 import Float8
from .mxfp4 import MXFP4
from .nvfp4 import NVFP4

_INT32 = (torch.int32,)


@dataclass(frozen=True)
class PackQuantized(StoredFormat):
    """compressed-tensors' pack-quantized: (q - z) * scale; q packed along the rows of the weight, z along its columns.

    Attributes:
        bits: 4 or 8.
        group_size: Columns with one scale; -1: all.
        symmetric: Whether there are no zero points.
        act_order: Whether weight_g_idx gives each column's group.
        quantizes_x: As StoredFormat's.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    quantizes_x: bool = False
    name: str = "compressed-tensors pack-quantized"
    scales: str = "weight_scale"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, words = shapes["weight_packed"]
        return n, words * (32 // self.bits)

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups_of(k, self.group_size)
        per_word, groups = 32 // self.bits, columns_in(k, self.group_size)
        whole_words("in_features", k, per_word)
        indices = Dim(k, "columns", k, k) if self.act_order else columns_in(k)  # act-order cannot be cut
        tensors = {
            "weight_packed": Expected(((rows_in(n), columns_in(k, per_word)),), _INT32),
            "weight_scale": Expected(((rows_in(n), groups),), FLOATS),
            "weight_shape": Expected(((Dim(2),),), (torch.int64, torch.int32), optional=True),
            "weight_g_idx": Expected(((indices,),), (torch.int32, torch.int64), optional=not self.act_order),
        }
        if not self.symmetric:  # older files have int8 zero points, not packed
            layouts = ((rows_in(n, per_word), groups), (rows_in(n), groups))
            tensors["weight_zero_point"] = Expected(layouts, (torch.int32, torch.int8))
        return tensors

    def checked_tensors(self) -> tuple[str, ...]:
        return (self.scales, "weight_shape", "weight_g_idx")

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        shape, index = tensors.get("weight_shape"), tensors.get("weight_g_idx")
        if shape is not None and shape.tolist() != [n, k]:
            return "weight_shape", f"be [{n}, {k}]", f"{shape.tolist()}"
        groups = groups_of(k, self.group_size)
        if index is not None and self.act_order and k and not (int(index.min()) >= 0 and int(index.max()) < groups):
            return "weight_g_idx", f"be from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}"
        return super().check(tensors, n, k)

    def _zero_points(self, tensors: Mapping[str, Tensor], n: int) -> Tensor | None:
        """Return [n, groups], from 0 to 2 ** bits - 1; None: all are 2 ** (bits - 1)."""
        if self.symmetric:
            return None
        z, per_word = tensors["weight_zero_point"], 32 // self.bits
        if z.dtype == torch.int8:
            return z.to(torch.int16) + (1 << self.bits - 1)
        return nibbles(z.t().contiguous(), tuple(range(per_word)), self.bits)[:, :n].t().to(torch.int16)

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        q = nibbles(tensors["weight_packed"][rows], tuple(range(32 // self.bits)), self.bits).double()
        scales, z = tensors["weight_scale"][rows], self._zero_points(tensors, n)
        z = torch.full_like(scales, 1 << self.bits - 1) if z is None else z[rows]
        if self.act_order:
            index = tensors["weight_g_idx"].long()
            return (q - z.double()[:, index]) * scales.double()[:, index]
        return (q - by_group(z, k)) * by_group(scales, k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        groups, packed, scales = groups_of(k, self.group_size), tensors["weight_packed"], tensors["weight_scale"]
        if self.bits == 8 and groups == 1 and self.symmetric:
            return LinearWeight("int8", signed(packed.view(torch.uint8)), scales[:, 0].float())
        if self.bits != 4 or not int4_group(k // groups):
            return dense_weight(self, tensors, n, k, target.dtype)
        integers, columns = packed.view(torch.uint8), None
        if self.act_order:
            index = tensors["weight_g_idx"].long()
            if not torch.equal(index.bincount(minlength=groups), torch.full((groups,), k // groups)):
                return dense_weight(self, tensors, n, k, target.dtype)
            columns = index.argsort(stable=True)
            integers = pack_nibbles(nibbles(packed)[:, columns])
        return int4_weight(integers, scales, self._zero_points(tensors, n), target, columns)


@dataclass(frozen=True)
class IntQuantized(StoredFormat):
    """compressed-tensors' int-quantized: (q - z) * scale, q of int8.

    Attributes:
        group_size: Columns with one scale; -1: all.
        symmetric: Whether there are no zero points.
        quantizes_x: As StoredFormat's.
    """

    group_size: int = -1
    symmetric: bool = True
    quantizes_x: bool = False
    name: str = "compressed-tensors int-quantized"
    scales: str = "weight_scale"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        layouts: tuple[tuple[Dim, ...], ...] = ((rows_in(n), columns_in(k, self.group_size)),)
        if groups_of(k, self.group_size) == 1:
            layouts += ((rows_in(n),), (Dim(1),), ())
        tensors = {
            "weight": Expected(((rows_in(n), columns_in(k)),), (torch.int8,)),
            "weight_scale": Expected(layouts, FLOATS),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = Expected(layouts, (torch.int8,))
        return tensors

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        q, scales = tensors["weight"][rows].double(), by_row(tensors["weight_scale"], n)[rows]
        if not self.symmetric:
            q = q - by_group(by_row(tensors["weight_zero_point"], n)[rows], k)
        return q * by_group(scales, k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        if groups_of(k, self.group_size) > 1 or not self.symmetric:
            return dense_weight(self, tensors, n, k, target.dtype)
        scales = by_row(tensors["weight_scale"], n)[:, 0].float().contiguous()
        return LinearWeight("int8", tensors["weight"], scales)


class _Kind(NamedTuple):
    """The types, bits and strategies that a `format` of compressed-tensors allows."""

    type: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]


_KINDS = {
    "pack-quantized": _Kind("int", (4, 8), ("group", "channel")),
    "int-quantized": _Kind("int", (8,), ("channel", "tensor", "group")),
    "float-quantized": _Kind("float", (8,), ("channel", "tensor", "block")),
    "mxfp4-pack-quantized": _Kind("float", (4,), ("group",)),
    "nvfp4-pack-quantized": _Kind("float", (4,), ("tensor_group",)),
}
_NAIVE = "naive-quantized"  # int-quantized or float-quantized, by the type


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    for field, what in (
        ("kv_cache_scheme", "a quantized cache of a checkpoint"),
        ("transform_config", "a rotation of weights and activations"),
    ):
        if fields[field]:
            raise fields.unsupported(field, what)
    sparsity = fields["sparsity_config"] or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise fields.unsupported("sparsity_config", f"sparse weights ({sparsity.get('format')!r})")
    if not isinstance(fields["config_groups"], Mapping) or not fields["config_groups"]:
        raise fields.fault("config_groups", "be an object of groups", fields["config_groups"])
    groups = fields.inside("config_groups")
    schemes: list[tuple[str, StoredFormat]] = []
    for key, group in groups.config.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise groups.fault(key, "be an object with targets, a list", group)
        format = _scheme(fields, groups.inside(key))
        schemes += [(str(target), format) for target in group["targets"]]

    def format_of(name: str) -> StoredFormat:
        """Return the scheme whose target is the name, else a pattern that matches it, else the class."""
        for target, format in schemes:
            if target == name:
                return format
        for target, format in schemes:
            if target.startswith("re:") and re.match(target[3:], name):
                return format
        for target, format in schemes:
            if target == "Linear":
                return format
        targets = ", ".join(target for target, _ in schemes)
        raise fields.fault("config_groups", f"have a target for {name}, which is quantized", targets)

    return format_of


def _scheme(fields: Fields, group: Fields) -> StoredFormat:
    weights, inputs = group.inside("weights"), group["input_activations"]
    whole = fields["format"]
    name = group["format"] or (None if whole == "mixed-precision" else whole)
    if name != _NAIVE and name not in _KINDS:
        rule = f"be one of {', '.join([*_KINDS, _NAIVE])}"
        raise (fields if whole == name else group).fault("format", rule, name)
    type_ = weights.one_of("type", ("int", "float"), "int")
    symmetric = weights.one_of("symmetric", (True, False), True)
    if name == _NAIVE:
        name = f"{type_}-quantized"
    kind = _KINDS[name]
    bits = weights.one_of("num_bits", kind.bits)
    if type_ != kind.type:
        raise weights.fault("type", f"go with format {name}", type_)
    strategy = weights.one_of("strategy", kind.strategies)
    size = weights.group_size("group_size") if strategy == "group" else -1
    if isinstance(inputs, Mapping) and type_ == "int" and inputs.get("dynamic") not in (True, "local"):
        raise group.unsupported("input_activations", "int8 activations with a fixed scale")
    if name == "pack-quantized":
        return PackQuantized(bits, size, symmetric, weights["actorder"] in (True, "group"), isinstance(inputs, Mapping))
    if name == "int-quantized":
        return IntQuantized(size, symmetric, isinstance(inputs, Mapping))
    if not symmetric:
        raise weights.fault("symmetric", f"be true for format {name}", symmetric)
    if name == "mxfp4-pack-quantized":
        if size != 32:
            raise weights.fault("group_size", "be 32 for MXFP4", size)
        return MXFP4()
    if name == "nvfp4-pack-quantized":
        if weights["group_size"] != 16:
            raise weights.fault("group_size", "be 16 for NVFP4", weights["group_size"])
        return NVFP4()
    if strategy == "block":
        block = weights.block("block_structure")
        return Float8("weight_scale", block, "compressed-tensors float-quantized in blocks")
    return Float8(name="compressed-tensors float-quantized")


METHODS = (
    Method(
        "compressed-tensors",
        ("weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape"),
        _parse,
    ),
)
