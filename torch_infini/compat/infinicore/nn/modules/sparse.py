"""Embedding: a table whose rows are looked up."""

from __future__ import annotations

from ...device import device as Device
from ...dtype import dtype as DataType
from ...dtype import float32
from ...tensor import Tensor, empty
from .. import functional
from ..parameter import Parameter
from .module import Module


class Embedding(Module):
    """A table of rows; the weight is uninitialized.

    Args:
        num_embeddings: Rows.
        embedding_dim: Size of a row.
        padding_idx: A row, from -num_embeddings; has no effect, since there are no gradients.
        max_norm, norm_type, scale_grad_by_freq, sparse, _weight, _freeze: As in torch; must have their defaults.
        device: The weight's device; None: the CPU.
        dtype: The weight's dtype; None: float32.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Device | str | None = None,
        dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        given = (max_norm, norm_type, scale_grad_by_freq, sparse, _weight, _freeze)
        if given != (None, 2.0, False, False, None, False):
            raise AssertionError(
                "infinicore.nn.Embedding: max_norm, norm_type, scale_grad_by_freq, sparse, _weight and _freeze must "
                f"have their defaults, got {given}"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise AssertionError(
                f"infinicore.nn.Embedding: padding_idx must be below {num_embeddings}, got {padding_idx}"
            )
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        place = device or Device("cpu")
        self.weight = Parameter(empty([num_embeddings, embedding_dim], dtype=dtype or float32, device=place))

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows with these indices, int32 or int64 of any shape: [*shape, embedding_dim]."""
        return functional.embedding(input, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
