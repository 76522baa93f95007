"""KVCache: keys and values of all layers, in blocks of tokens that block tables name.

A static cache is a paged one with a single block for each sequence: one kernel and one layout serve both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _memory


class KVCache:
    """Two tensors [layers, blocks, kv_heads, block_size, head_dim], for keys and for values.

    Args:
        layers: Decoder layers.
        blocks: Blocks that sequences share.
        kv_heads: Key heads of a layer.
        block_size: Tokens in a block.
        head_dim: Columns of a head.
        dtype: Of the keys and values: the model's.
        device: Where they are.

    Attributes:
        keys: Keys of all layers; `keys[i]` is what paged_attention calls k_cache.
        values: Likewise.

    Raises:
        ValueError: For a size below 1.
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"layers": layers, "blocks": blocks, "kv_heads": kv_heads, "block_size": block_size}
        for name, size in {**sizes, "head_dim": head_dim}.items():
            if size < 1:
                raise ValueError(f"torch_infini.nn.KVCache: {name} must be at least 1, got {size}")
        shape = (layers, blocks, kv_heads, block_size, head_dim)
        self.keys, self.values = (_memory.new(*shape, dtype=dtype, device=device) for _ in range(2))
        self._layers = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @property
    def blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        layers, _, kv_heads, _, head_dim = self.keys.shape
        return 2 * layers * kv_heads * head_dim * self.keys.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [blocks, kv_heads, block_size, head_dim]."""
        return self._layers[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, one pair (from, to) after the other."""
        for source, target in pairs:
            for cache in (self.keys, self.values):
                cache[:, target].copy_(cache[:, source])
