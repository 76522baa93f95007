"""Formats of 4-bit and 8-bit integers in int32 words: AWQ, GPTQ, and compressed-tensors' pack-quantized.

Of all of them linear_int4 multiplies by the integers as they are; AWQ's are transposed and reordered first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .weight import (
    FLOATS,
    Expected,
    LinearWeight,
    by_group,
    dense_weight,
    int4_group,
    int4_weight,
    nibbles,
    not_finite,
    pack_nibbles,
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of column 8c + j
_INT32 = (torch.int32,)


def groups_of(k: int, group_size: int) -> int:
    """The number of groups of a row; ValueError if they do not divide it. A size of -1 is the whole row."""
    if group_size == -1:
        return 1
    if k % group_size:
        raise ValueError(f"in_features must be a multiple of group_size, {group_size}, got {k}")
    return k // group_size


def whole_words(what: str, size: int, elements: int) -> int:
    """Return size / elements; ValueError if it is no integer."""
    if size % elements:
        raise ValueError(f"{what} must be a multiple of {elements}, the integers of a word, got {size}")
    return size // elements


@dataclass(frozen=True)
class AWQ:
    """(q - z) * scale; q and z packed along the rows of weight^T [k, n].

    Attributes:
        group_size: Rows of weight^T with one scale; -1: all.
    """

    group_size: int
    name: str = "awq"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        k, words = shapes["qweight"]
        return 8 * words, k

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups, words = groups_of(k, self.group_size), whole_words("out_features", n, 8)
        return {
            "qweight": Expected(((k, words),), _INT32),
            "qzeros": Expected(((groups, words),), _INT32),
            "scales": Expected(((groups, n),), FLOATS),
        }

    def small(self) -> tuple[str, ...]:
        return ("scales",)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        return not_finite("scales", tensors["scales"])

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        count = n if count < 0 else count
        words = slice(first // 8, (first + count + 7) // 8)
        q = nibbles(tensors["qweight"][:, words], _AWQ_ORDER)[:, :count].t().double()
        z = nibbles(tensors["qzeros"][:, words], _AWQ_ORDER)[:, :count].t()
        return (q - by_group(z, k)) * by_group(tensors["scales"][:, first : first + count].t(), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        if not int4_group(k // groups_of(k, self.group_size)):
            return dense_weight(self, tensors, n, k, dtype)
        packed = pack_nibbles(nibbles(tensors["qweight"], _AWQ_ORDER).t()).contiguous()
        return int4_weight(packed, tensors["scales"].t(), nibbles(tensors["qzeros"], _AWQ_ORDER).t(), dtype)


@dataclass(frozen=True)
class GPTQ:
    """(q - z) * scale[g_idx]; q packed along the columns of weight^T [k, n], z along its rows.

    Attributes:
        bits: 4 or 8.
        group_size: Rows of weight^T with one scale; -1: all.
        symmetric: Whether every z is 2 ** (bits - 1).
        version: 1, where z - 1 is stored, or 2.
        act_order: Whether groups are those of g_idx, and not neighbours.
    """

    bits: int
    group_size: int
    symmetric: bool
    version: int = 1
    act_order: bool = False

    @property
    def name(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        rows, n = shapes["qweight"]
        return n, rows * (32 // self.bits)

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups, per_word = groups_of(k, self.group_size), 32 // self.bits
        rows, words = whole_words("in_features", k, per_word), whole_words("out_features", n, per_word)
        return {
            "qweight": Expected(((rows, n),), _INT32),
            "qzeros": Expected(((groups, words),), _INT32),
            "scales": Expected(((groups, n),), FLOATS),
            "g_idx": Expected(((k,),), (torch.int32, torch.int64), optional=not self.act_order),
        }

    def small(self) -> tuple[str, ...]:
        return ("scales", "g_idx", "qzeros") if self.symmetric else ("scales", "g_idx")

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        groups = groups_of(k, self.group_size)
        if fault := not_finite("scales", tensors["scales"]):
            return fault
        if self.symmetric:
            middle, z = 1 << self.bits - 1, self._zero_points(tensors, 0, n)
            if not (z == middle).all():
                wrong = z[z != middle][0].item()
                return "qzeros", f"be {middle} everywhere, because the config says sym: true", f"{wrong}"
        index = tensors.get("g_idx")
        if index is None:
            return None
        if k and not (int(index.min()) >= 0 and int(index.max()) < groups):
            return "g_idx", f"be from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}"
        if not self.act_order and not torch.equal(index.long(), self._neighbours(k)):
            at = int((index.long() != self._neighbours(k)).nonzero()[0])
            rule = f"be row / group_size, because the config says desc_act: false ({at // (k // groups)} at row {at})"
            return "g_idx", rule, f"{int(index[at])}"
        return None

    def _neighbours(self, k: int) -> Tensor:
        groups = groups_of(k, self.group_size)
        return torch.arange(groups).repeat_interleave(k // groups)

    def _zero_points(self, tensors: Mapping[str, Tensor], first: int, count: int) -> Tensor:
        """[groups, count], from 0 to 2 ** bits."""
        per_word = 32 // self.bits
        words = tensors["qzeros"][:, first // per_word : -(-(first + count) // per_word)]
        stored = nibbles(words, tuple(range(per_word)), self.bits)[:, :count]
        return stored.to(torch.int16) + (1 if self.version == 1 else 0)

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        count = n if count < 0 else count
        words = tensors["qweight"][:, first : first + count].t().contiguous()
        q = nibbles(words, tuple(range(32 // self.bits)), self.bits).double()
        index = tensors["g_idx"].long() if self.act_order else self._neighbours(k)
        z = self._zero_points(tensors, first, count).t().double()[:, index]
        return (q - z) * tensors["scales"][:, first : first + count].t().double()[:, index]

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        groups = groups_of(k, self.group_size)
        scales = tensors["scales"].t()
        if self.bits == 8 and groups == 1 and self.symmetric:
            integers = tensors["qweight"].t().contiguous().view(torch.uint8)
            return LinearWeight("int8", signed(integers), scales[:, 0].float())
        if self.bits != 4 or not int4_group(k // groups):
            return dense_weight(self, tensors, n, k, dtype)
        columns = None
        if self.act_order:
            index = tensors["g_idx"].long()
            if not torch.equal(index.bincount(minlength=groups), torch.full((groups,), k // groups)):
                return dense_weight(self, tensors, n, k, dtype)  # groups of unequal sizes
            columns = index.argsort(stable=True)
            columns = None if torch.equal(columns, torch.arange(k)) else columns
        packed = tensors["qweight"].t().contiguous().view(torch.uint8)
        if columns is not None:
            packed = pack_nibbles(nibbles(packed.view(torch.int32))[:, columns])
        z = None if self.symmetric else self._zero_points(tensors, 0, n).t()
        return int4_weight(packed, scales, z, dtype, columns)


@dataclass(frozen=True)
class PackQuantized:
    """compressed-tensors' pack-quantized: (q - z) * scale; q packed along the rows of the weight, z along its columns.

    Attributes:
        bits: 4 or 8.
        group_size: Columns with one scale; -1: all.
        symmetric: Whether there are no zero points.
        act_order: Whether weight_g_idx has the groups.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    name: str = "compressed-tensors pack-quantized"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, words = shapes["weight_packed"]
        return n, words * (32 // self.bits)

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups, per_word = groups_of(k, self.group_size), 32 // self.bits
        tensors = {
            "weight_packed": Expected(((n, whole_words("in_features", k, per_word)),), _INT32),
            "weight_scale": Expected(((n, groups),), FLOATS),
            "weight_shape": Expected(((2,),), (torch.int64, torch.int32), optional=True),
            "weight_g_idx": Expected(((k,),), (torch.int32, torch.int64), optional=not self.act_order),
        }
        if not self.symmetric:  # older files have int8 zero points, not packed
            shapes = ((-(-n // per_word), groups), (n, groups))
            tensors["weight_zero_point"] = Expected(shapes, (torch.int32, torch.int8))
        return tensors

    def small(self) -> tuple[str, ...]:
        return ("weight_scale", "weight_shape", "weight_g_idx")

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        shape, index = tensors.get("weight_shape"), tensors.get("weight_g_idx")
        if shape is not None and shape.tolist() != [n, k]:
            return "weight_shape", f"be [{n}, {k}]", f"{shape.tolist()}"
        groups = groups_of(k, self.group_size)
        if index is not None and self.act_order and k and not (int(index.min()) >= 0 and int(index.max()) < groups):
            return "weight_g_idx", f"be from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}"
        return not_finite("weight_scale", tensors["weight_scale"])

    def _zero_points(self, tensors: Mapping[str, Tensor], n: int) -> Tensor | None:
        """[n, groups], from 0 to 2 ** bits - 1; None: all in the middle."""
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

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> LinearWeight:
        groups, packed, scales = groups_of(k, self.group_size), tensors["weight_packed"], tensors["weight_scale"]
        if self.bits == 8 and groups == 1 and self.symmetric:
            return LinearWeight("int8", signed(packed.view(torch.uint8)), scales[:, 0].float())
        if self.bits != 4 or not int4_group(k // groups):
            return dense_weight(self, tensors, n, k, dtype)
        integers, columns = packed.view(torch.uint8), None
        if self.act_order:
            index = tensors["weight_g_idx"].long()
            if not torch.equal(index.bincount(minlength=groups), torch.full((groups,), k // groups)):
                return dense_weight(self, tensors, n, k, dtype)
            columns = index.argsort(stable=True)
            integers = pack_nibbles(nibbles(packed)[:, columns])
        return int4_weight(integers, scales, self._zero_points(tensors, n), dtype, columns)


def signed(values: Tensor) -> Tensor:
    """Return q - 128 as int8, of q as uint8."""
    return (values ^ 128).view(torch.int8)
