"""Quantized experts of a mixture: one tensor's values for all experts, stored in several tensors beside each other.

A format of them registers by Method.experts; it converts its tensors to blocks of linear_blocks, without loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .weight import TensorInfo

DENSE = "dense"  # the kind of experts that are no blocks for fused_experts


class StoredExperts(NamedTuple):
    """The weights of one product of all experts, each of n rows and k columns.

    Attributes:
        format: How they are stored.
        experts: The number of experts.
        n: The columns of the product's result.
        k: The columns of its input.
        names: The names of the tensors, as the format calls them.
    """

    format: ExpertsFormat
    experts: int
    n: int
    k: int
    names: Mapping[str, str]


class ExpertsFormat(ABC):
    """How one format stores the weights [experts, n, k] of a product.

    Attributes:
        name: The name in errors.
        kind: The kind of block of linear_blocks, also a name of torch_infini.weights.FORMATS; or DENSE.
        parts: What is added to the name of the model's tensor for those that are stored.
        transposed: Whether the model's tensor is [experts, k, n]; else [experts, n, k].
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    transposed: bool = True

    @abstractmethod
    def size(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int, int] | None:
        """Return (experts, n, k) by the first part; None for another rank."""

    @abstractmethod
    def expected(self, experts: int, n: int, k: int) -> dict[str, TensorInfo]:
        """Return the parts' dtypes and shapes."""

    @abstractmethod
    def check(self, tensors: Mapping[str, Tensor]) -> tuple[str, str, str] | None:
        """Return (part, rule, given value) if a value is invalid."""

    @abstractmethod
    def blocks(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weights in blocks, [experts, n, k / elements, bytes] uint8, with exactly the stored values.

        If `kind` is DENSE, [experts, n, k] of a floating dtype, rounded once.
        """
