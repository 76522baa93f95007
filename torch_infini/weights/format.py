"""Format: how the weight of a linear layer is kept as integers, and what can be done with it.

A format is a module of this package that has a FORMAT; layers of models and of patched models know no other way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Integers(NamedTuple):
    """A weight [n, k] as a format keeps it; `zeros` is there where a format has them."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor; how many rows and columns of the weight an element of its first and second
    dimension has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: int = 1
    rows: int = 1


class Format(ABC):
    """One format.

    Attributes:
        name: In files, and of nn.Linear.
        serves: What models call it, `weights=`, and other formats of its kind.
        exact: What `weights=` is for this one alone; empty: its name.
        order: Of those that serve one name, which is taken first where it quantizes.
        groups: The sizes of groups that a file may name, preferred ones first; (0,) where there is no choice.
        panel: Rows that lie together in memory. Weights become one by concatenation where all but the last have a
            multiple of it.
    """

    name: str
    serves: str
    exact: str = ""
    order: int = 0
    groups: tuple[int, ...] = (0,)
    panel: int = 1

    def serves_on(self, device: torch.device) -> bool:
        """Whether a device has kernels for the product."""
        return True

    def quantizes_on(self, device: torch.device) -> bool:
        """Whether models on a device are quantized to it; others come there quantized."""
        return self.serves_on(device)

    def group(self, k: int) -> int:
        """Return the group for rows of k columns; ValueError with the rule if none fits."""
        return self.groups[0]

    @abstractmethod
    def kinds(self, n: int, k: int, group: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return what the tensors of a weight [n, k] are, by their names in Integers; dtype: that of activations."""

    @abstractmethod
    def quantize(self, weight: Tensor, to: Integers, first_row: int = 0) -> None:
        """Quantize rows of a weight, [m, k] in full precision, to rows from first_row on.

        Raises:
            ValueError: For infinity or NaN in it, or a device that has no kernels for that.
        """

    @abstractmethod
    def dequantize(self, of: Integers, first: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight in full precision: [rows, k], a copy."""

    @abstractmethod
    def product(self, x: Tensor, by: Integers, bias: Tensor | None, same_bits: bool, out: Tensor | None) -> Tensor:
        """Multiply the rows of x [..., k] by the transposed weight, and add the bias.

        The engine records its decode steps: there it may call ops of torch.ops.infini alone, and make views.

        Args:
            x: Activations.
            by: The weight.
            bias: [n], or None.
            same_bits: A row's bits must not depend on the other rows.
            out: [..., n], written and returned; None: a new tensor.
        """

    def put(self, some: Tensor, first: int, to: Tensor, row: int, rows: int) -> None:
        """Copy rows of the weight, as one of its tensors has them, from row `first` on to another's from `row` on.

        Threads may copy different rows at the same time.
        """
        to[row : row + rows].copy_(some[first : first + rows])

    def empty(
        self,
        n: int,
        k: int,
        group: int,
        dtype: torch.dtype,
        new: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> Integers:
        """Make the tensors of a weight by new(shape, dtype)."""
        return Integers(**{name: new(kind.shape, kind.dtype) for name, kind in self.kinds(n, k, group, dtype).items()})
