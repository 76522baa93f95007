"""AWQ: 4-bit integers in int32 words, transposed and reordered for linear_int4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..method import Fields, Method
from ..weight import (
    FLOATS,
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    by_group,
    columns_in,
    dense_weight,
    groups_of,
    int4_group,
    int4_weight,
    nibbles,
    pack_nibbles,
    rows_in,
    whole_words,
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # entry j: the nibble of column 8c + j
_INT32 = (torch.int32,)


@dataclass(frozen=True)
class AWQ(StoredFormat):
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
        groups_of(k, self.group_size)
        whole_words("out_features", n, 8)
        groups = columns_in(k, self.group_size)
        return {
            "qweight": Expected(((columns_in(k), rows_in(n, 8)),), _INT32),
            "qzeros": Expected(((groups, rows_in(n, 8)),), _INT32),
            "scales": Expected(((groups, rows_in(n)),), FLOATS),
        }

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        count = n if count < 0 else count
        words = slice(first // 8, (first + count + 7) // 8)
        q = nibbles(tensors["qweight"][:, words], _AWQ_ORDER)[:, :count].t().double()
        z = nibbles(tensors["qzeros"][:, words], _AWQ_ORDER)[:, :count].t()
        return (q - by_group(z, k)) * by_group(tensors["scales"][:, first : first + count].t(), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        if not int4_group(k // groups_of(k, self.group_size)):
            return dense_weight(self, tensors, n, k, target.dtype)
        packed = pack_nibbles(nibbles(tensors["qweight"], _AWQ_ORDER).t()).contiguous()
        return int4_weight(packed, tensors["scales"].t(), nibbles(tensors["qzeros"], _AWQ_ORDER).t(), target)


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    fields.one_of("w_bit" if "w_bit" in fields.config else "bits", (4,))
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    fields.one_of("zero_point", (True,), True)
    format = AWQ(fields.group_size("q_group_size" if "q_group_size" in fields.config else "group_size"))
    return lambda name: format


METHODS = (Method("awq", ("qweight", "qzeros", "scales"), _parse, "quant_config.json"),)
