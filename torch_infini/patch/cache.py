"""Appending keys and values to the caches of transformers, to its growing cache in place.

DynamicLayer concatenates: every token copies all that came before it. Here the layer's tensors become the beginning of
larger ones, behind which the next tokens are written; whatever else is done to the layer works as before.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

STEP = 256  # tokens by which a cache grows at least
GROWTH = 8  # and by this part of its length: in all, the copies cost as much as this many writes of the whole


class Room:
    """The larger tensors of one cache layer, and the beginnings of them that the layer was given."""

    def __init__(self, owner: DynamicLayer, keys: Tensor, values: Tensor) -> None:
        self.owner = ref(owner)  # a copy of the layer must not write into the same memory
        self.keys, self.values = keys, values
        self.length = 0  # of what the layer holds
        self.given = ref(keys), ref(values)  # what only the layer holds may be told from what others hold

    def serves(self, layer: DynamicLayer, length: int) -> bool:
        """Whether the layer still holds what it was given, or the beginning of it, and there is room behind it."""
        return (
            self.owner() is layer
            and length <= self.keys.shape[2]
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
            and (layer.keys is self.given[0]() or is_free_behind(layer.keys, self.keys))
            and (layer.values is self.given[1]() or is_free_behind(layer.values, self.values))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled layer has none until it grows


def is_free_behind(part: Tensor, whole: Tensor) -> bool:
    """Whether part is the first tokens of whole, [B, heads, T, D], in its memory, and nobody sees those behind it.

    So it is in a cache that was cropped, unless somebody kept what it held before, or a slice of that.
    """
    return (
        part.data_ptr() == whole.data_ptr()
        and part.dtype == whole.dtype
        and part.stride() == whole.stride()
        and part.shape[:2] == whole.shape[:2]
        and part.shape[3] == whole.shape[3]
        and tensors_in(whole) == 2
    )


def tensors_in(x: Tensor) -> int | None:
    """How many tensors share the memory of x; None where this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count and count(x.untyped_storage()._cdata) - 1  # the storage object made here is no tensor


def growing_layer(cache: Any, index: int) -> DynamicLayer | None:
    """The cache's layer, if it is a DynamicLayer that is updated in the ordinary way."""
    if (
        isinstance(cache, Cache)
        and type(cache).update is Cache.update
        and not cache.offloading
        and index < len(cache.layers)
        and type(cache.layers[index]) is DynamicLayer
        and not torch.compiler.is_compiling()
    ):
        return cache.layers[index]
    return None


def static_layer(cache: Any, index: int, like: Tensor, batch: int, heads: int, size: int) -> StaticLayer | None:
    """The cache's layer [batch, heads, T, size], if it is a StaticLayer that is updated in the ordinary way.

    It counts its tokens in a tensor, so that a captured step finds its place anew at each replay.
    """
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update or torch.compiler.is_compiling():
        return None
    layer = cache.layers[index] if index < len(cache.layers) and not cache.offloading else None
    if type(layer) is not StaticLayer or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
        return None
    if not layer.is_initialized:
        none = like.new_empty((batch, heads, 0, size))
        layer.lazy_initialization(none, none)
    shape = (batch, heads, layer.keys.shape[2], size)
    alike = layer.keys.shape == shape == layer.values.shape and layer.keys.dtype == like.dtype == layer.values.dtype
    return layer if alike and layer.keys.device == like.device else None


def needs_grad(cache: Any) -> bool:
    """Whether a backward may go into what the cache holds, as into learned prefixes."""
    if cache is None or not torch.is_grad_enabled():
        return False
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return any(isinstance(x, Tensor) and x.requires_grad for x in held)


def append(cache: Any, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys and values [B, S, heads, D] behind those of a cache's layer; all of them, as [B, T, heads, D]."""
    layer = growing_layer(cache, index)
    room = None if layer is None else reserve(layer, k, *k.shape)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # the cache keeps [B, heads, S, D]
    if layer is None or room is None:
        k, v = cache.update(k, v, index)
        return k.transpose(1, 2), v.transpose(1, 2)
    new = room.length + k.shape[2]
    room.keys[:, :, room.length : new] = k
    room.values[:, :, room.length : new] = v
    return give(layer, room, new)


def reserve(layer: DynamicLayer, like: Tensor, batch: int, length: int, heads: int, size: int) -> Room | None:
    """Room behind what the layer holds, whose length it knows; None where only the layer's own update will do.

    `like` has the dtype of the keys.
    """
    keys = layer.keys if layer.is_initialized else None
    old = 0 if keys is None or keys.numel() == 0 else keys.shape[2]
    if old and (keys.dtype != like.dtype or keys.shape[0] != batch or keys.shape[1] != heads or keys.shape[3] != size):
        return None  # update says what is wrong
    room: Room | None = vars(layer).get("_infini_room")
    if not old or room is None or not room.serves(layer, old + length):
        layer._infini_room = room = None  # frees memory that the layer has left
        if keys is None:
            layer.lazy_initialization(like, like)
        capacity = old + length + max(STEP, (old + length) // GROWTH)
        new_keys, new_values = (like.new_empty((batch, heads, capacity, size)) for _ in range(2))
        if old:
            new_keys[:, :, :old], new_values[:, :, :old] = layer.keys, layer.values
        room = layer._infini_room = Room(layer, new_keys, new_values)
    room.length = old
    return room


def give(layer: DynamicLayer, room: Room, length: int) -> tuple[Tensor, Tensor]:
    """Let the layer hold the first tokens of its room; (keys, values) as [B, T, heads, D]."""
    layer.keys, layer.values = room.keys.narrow(2, 0, length), room.values.narrow(2, 0, length)
    room.given = ref(layer.keys), ref(layer.values)
    return layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
