"""KVCache, MixedKVCache: keys and values of all layers, in blocks of tokens that block tables refer to.

A static cache is a paged one with a single block per sequence: one kernel and one layout serve both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.memory import allocate
from .states import SequenceStates


class LayerCache(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        keys: [blocks, kv_heads, block_size, head_dim].
        values: As keys.
        key_scales: [blocks, kv_heads, block_size] float32 if keys and values are int8: a row means the row times its
            scale. None if they are floats.
        value_scales: As key_scales.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, with their scales if they are int8."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * layers * kv_heads * (head_dim * dtype.itemsize + scale)


class KVCache:
    """Two tensors [layers, blocks, kv_heads, block_size, head_dim], for keys and for values.

    With int8, each row of a token and head has a float32 scale, max |row| / 127: 0.52 to 0.56 of the bytes of bfloat16
    for heads of 128 to 32 columns. docs/engine.md states the cost in accuracy.

    Args:
        layers: Decoder layers.
        blocks: Blocks that sequences share.
        kv_heads: Key heads per layer.
        block_size: Tokens per block.
        head_dim: Columns per head.
        dtype: Of the keys and values: the model's dtype, or int8.
        device: Of the keys and values.

    Attributes:
        keys: Keys of all layers; `keys[i]` is the k_cache of paged_attention.
        values: Values of all layers, likewise.
        scales: Scales of the keys and of the values, [layers, blocks, kv_heads, block_size] each; empty unless int8.
        states: Of the model's layers that keep other states; None: it has none.

    Raises:
        ValueError: For a size below 1, or a dtype that attention does not support.
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
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
            raise ValueError(f"torch_infini.nn.KVCache: dtype must be float32, bfloat16, float16 or int8, got {dtype}")
        shape = (layers, blocks, kv_heads, block_size, head_dim)
        self.keys, self.values = (allocate(*shape, dtype=dtype, device=device) for _ in range(2))
        count = 2 if dtype == torch.int8 else 0
        self.scales = tuple(allocate(*shape[:-1], dtype=torch.float32, device=device) for _ in range(count))
        self.states: SequenceStates | None = None
        self._tensors = (self.keys, self.values, *self.scales)
        self._layers = [LayerCache(*parts) for parts in zip(*(t.unbind(0) for t in self._tensors), strict=True)]

    @property
    def blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers, with their scales."""
        layers, _, kv_heads, _, head_dim = self.keys.shape
        return token_bytes(layers, kv_heads, head_dim, self.keys.dtype)

    def layer(self, index: int) -> LayerCache:
        """Keys and values of one layer, with their scales."""
        return self._layers[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, one pair (from, to) after the other."""
        for source, target in pairs:
            for cache in self._tensors:
                cache[:, target].copy_(cache[:, source])


class MixedKVCache:
    """A KVCache for layers with different numbers of heads or head sizes.

    Args:
        layers: (kv_heads, head_dim) of each layer.
        blocks, block_size, dtype, device: As in KVCache.

    Attributes:
        states: As KVCache's.

    Raises:
        ValueError: As KVCache, or if there are no layers.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not layers:
            raise ValueError("torch_infini.nn.MixedKVCache: layers must name at least one layer, got none")
        self._caches = {
            (kv_heads, head_dim): KVCache(
                layers.count((kv_heads, head_dim)), blocks, kv_heads, block_size, head_dim, dtype, device
            )
            for kv_heads, head_dim in dict.fromkeys(layers)
        }
        self._layers = [self._caches[sizes].layer(layers[:i].count(sizes)) for i, sizes in enumerate(layers)]
        self.blocks, self.block_size = blocks, block_size
        self.states: SequenceStates | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers, with their scales."""
        return sum(cache.bytes_per_token for cache in self._caches.values())

    def layer(self, index: int) -> LayerCache:
        """Keys and values of one layer, with their scales."""
        return self._layers[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, one pair (from, to) after the other."""
        for cache in self._caches.values():
            cache.copy_blocks(pairs)
