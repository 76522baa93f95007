"""GPTQ: 4-bit and 8-bit integers in int32 words along the columns of weight^T, with or without act-order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

_INT32 = (torch.int32,)


@dataclass(frozen=True)
class GPTQ(StoredFormat):
    """(q - z) * scale[g_idx]; q packed along the columns of weight^T [k, n], z along its rows.

    Attributes:
        bits: 4 or 8.
        group_size: Rows of weight^T with one scale; -1: all.
        symmetric: Whether every z is 2 ** (bits - 1).
        version: 1, where z - 1 is stored, or 2.
        act_order: Whether g_idx gives each column's group; else groups are adjacent columns.
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
        groups_of(k, self.group_size)
        per_word = 32 // self.bits
        whole_words("in_features", k, per_word)
        whole_words("out_features", n, per_word)
        groups = columns_in(k, self.group_size)
        indices = Dim(k, "columns", k, k) if self.act_order else columns_in(k)  # act-order cannot be cut
        return {
            "qweight": Expected(((columns_in(k, per_word), rows_in(n)),), _INT32),
            "qzeros": Expected(((groups, rows_in(n, per_word)),), _INT32),
            "scales": Expected(((groups, rows_in(n)),), FLOATS),
            "g_idx": Expected(((indices,),), (torch.int32, torch.int64), optional=not self.act_order),
        }

    def checked_tensors(self) -> tuple[str, ...]:
        return ("scales", "g_idx", "qzeros") if self.symmetric else ("scales", "g_idx")

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        groups = groups_of(k, self.group_size)
        if fault := super().check(tensors, n, k):
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
        """Return [groups, count], from 0 to 2 ** bits."""
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

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        groups = groups_of(k, self.group_size)
        scales = tensors["scales"].t()
        if self.bits == 8 and groups == 1 and self.symmetric:
            integers = tensors["qweight"].t().contiguous().view(torch.uint8)
            return LinearWeight("int8", signed(integers), scales[:, 0].float())
        if self.bits != 4 or not int4_group(k // groups):
            return dense_weight(self, tensors, n, k, target.dtype)
        columns = None
        if self.act_order:
            index = tensors["g_idx"].long()
            if not torch.equal(index.bincount(minlength=groups), torch.full((groups,), k // groups)):
                return dense_weight(self, tensors, n, k, target.dtype)  # groups of unequal sizes
            columns = index.argsort(stable=True)
            columns = None if torch.equal(columns, torch.arange(k)) else columns
        packed = tensors["qweight"].t().contiguous().view(torch.uint8)
        if columns is not None:
            packed = pack_nibbles(nibbles(packed.view(torch.int32))[:, columns])
        z = None if self.symmetric else self._zero_points(tensors, 0, n).t()
        return int4_weight(packed, scales, z, target, columns)


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    if fields["dynamic"]:
        raise fields.unsupported("dynamic", "GPTQ with other settings for some layers")
    bits = fields.one_of("bits", (4, 8))
    version = fields.one_of("checkpoint_format", ("gptq", "gptq_v2", "", None), "gptq")
    symmetric = fields.one_of("sym", (True, False), True)
    act_order = fields.one_of("desc_act", (True, False), False)
    size = fields.group_size("group_size")
    format = GPTQ(bits, size, symmetric, 2 if version == "gptq_v2" else 1, act_order and size != -1)
    return lambda name: format


METHODS = (Method("gptq", ("qweight", "qzeros", "scales", "g_idx"), _parse, "quantize_config.json"),)
