"""DecoderLayer: attention and MLP, each behind a norm and added to the residual stream.

Every addition is fused with the norm that follows it, so a layer also does the last addition of the previous one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .attention import Attention
from .batch import Batch
from .cache import LayerCache
from .linear import rows_of
from .mlp import SwiGLU
from .norm import RMSNorm


class DecoderLayer(nn.Module):
    """h = x + attention(norm(x)); y = h + mlp(norm(h)).

    Args:
        attention_norm: RMSNorm before attention.
        attention: Attention.
        mlp_norm: RMSNorm before the MLP.
        mlp: SwiGLU.
    """

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: SwiGLU) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: LayerCache, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer without its last addition.

        Args:
            x: [tokens, size].
            residual: [tokens, size], not yet added to x; None: no residual.
            batch: The sequences, positions and cache slots of the tokens.
            cache: Keys and values of this layer.
            last: Compute the result only for the last new token of each wanted sequence.

        Returns:
            (x, residual) for the next layer; their sum is the layer's result.
        """
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.after(x, residual)
        x = self.attention(x, batch, cache, last)
        if last:
            residual = rows_of(residual, batch.ends)
        x, residual = self.mlp_norm.after(x, residual)
        return self.mlp(x), residual


class DecoderLayers(nn.ModuleList):
    """A ModuleList of DecoderLayers."""

    if TYPE_CHECKING:  # torch's ModuleList does not know the type of its modules

        def __iter__(self) -> Iterator[DecoderLayer]: ...
