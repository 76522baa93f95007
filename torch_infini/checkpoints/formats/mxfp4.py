"""MXFP4: FP4 (E2M1) times a power of two (E8M0) for each 32 columns, as compressed-tensors and gpt-oss store it.

linear_blocks takes them in GGML's blocks, whose nibbles have another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._blocks import KINDS
from ...ops._blocks.ggml import fp4, power_of_two
from ..experts import ExpertsFormat
from ..method import Fields, Method
from ..weight import (
    Expected,
    LinearWeight,
    StoredFormat,
    Target,
    TensorInfo,
    by_group,
    columns_in,
    dense_weight,
    groups_of,
    rows_in,
)

KIND = KINDS["mxfp4"]


@dataclass(frozen=True)
class MXFP4(StoredFormat):
    """compressed-tensors' mxfp4-pack-quantized: FP4 (E2M1) times a power of two for each 32 columns."""

    name: str = "compressed-tensors mxfp4-pack-quantized"
    scales: str = "weight_scale"

    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, pairs = shapes["weight_packed"]
        return n, 2 * pairs

    def expected(self, n: int, k: int) -> dict[str, Expected]:
        groups_of(k, 32)
        return {
            "weight_packed": Expected(((rows_in(n), columns_in(k, 2)),), (torch.uint8,)),
            "weight_scale": Expected(((rows_in(n), columns_in(k, 32)),), (torch.uint8,)),
        }

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        if (tensors["weight_scale"] == 255).any():
            return "weight_scale", "be finite", "NaN (255 as an exponent)"
        return None

    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        rows = slice(first, n if count < 0 else first + count)
        packed, exponents = tensors["weight_packed"][rows], tensors["weight_scale"][rows]
        q = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        return fp4(q) * by_group(power_of_two(exponents), k)

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        if not target.takes_blocks:
            return dense_weight(self, tensors, n, k, target.dtype)
        return LinearWeight(
            KIND.name, ggml_blocks(tensors["weight_packed"].unflatten(1, (-1, 16)), tensors["weight_scale"])
        )


class MXFP4Experts(ExpertsFormat):
    """Experts of quant_method mxfp4 (gpt-oss): [experts, n, k / 32, 16] bytes of two neighbours, and exponents."""

    name, kind, parts = "mxfp4", KIND.name, ("_blocks", "_scales")

    def size(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int, int] | None:
        shape = infos["_blocks"].shape
        return (shape[0], shape[1], 32 * shape[2]) if len(shape) == 4 else None

    def expected(self, experts: int, n: int, k: int) -> dict[str, TensorInfo]:
        groups = experts, n, k // 32
        return {"_blocks": TensorInfo(torch.uint8, (*groups, 16)), "_scales": TensorInfo(torch.uint8, groups)}

    def check(self, tensors: Mapping[str, Tensor]) -> tuple[str, str, str] | None:
        return ("_scales", "be finite", "NaN (255 as an exponent)") if (tensors["_scales"] == 255).any() else None

    def blocks(self, tensors: Mapping[str, Tensor]) -> Tensor:
        packed, exponents = tensors["_blocks"], tensors["_scales"]
        blocks = torch.empty(*exponents.shape, KIND.bytes, dtype=torch.uint8)
        for e, some in enumerate(blocks):  # one after the other, because of what is held beside
            some.copy_(ggml_blocks(packed[e], exponents[e]))
        return blocks


def ggml_blocks(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return GGML's blocks [n, groups, 17] of bytes of two neighbours [n, groups, 16], and exponents [n, groups].

    In GGML's blocks a byte has the elements i and i + 16.
    """
    blocks = torch.empty(*exponents.shape, KIND.bytes, dtype=torch.uint8)
    blocks[..., 0] = exponents
    packed = packed.unflatten(-1, (2, 8))
    low, high = packed & 15, packed >> 4
    first, second = (torch.stack((low[..., i, :], high[..., i, :]), -1).flatten(-2) for i in range(2))
    blocks[..., 1:] = first | second << 4
    return blocks


def _parse(fields: Fields) -> Callable[[str], StoredFormat]:
    return lambda name: MXFP4()  # never called: linear layers of such a checkpoint are dense


METHODS = (Method("mxfp4", (), _parse, experts=MXFP4Experts()),)
