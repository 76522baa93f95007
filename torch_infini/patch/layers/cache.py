"""Appends keys and values to the caches of transformers; to DynamicCache in place.

DynamicLayer concatenates, so every token copies the whole cache. Here the layer's tensors are the beginning of larger
buffers, and the next tokens are written after them; all other uses of the layer work as before.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

STEP = 256  # a cache grows by at least this many tokens
GROWTH = 8  # and by 1/8 of its length: all copies together cost about 8 writes of the whole cache
GROWABLE = "_infini_growable"  # attribute of a DynamicLayer: its GrowableCache, or None


class GrowableCache:
    """The larger buffers of one cache layer; the layer holds views of their first tokens."""

    def __init__(self, owner: DynamicLayer, keys: Tensor, values: Tensor) -> None:
        self.owner = ref(owner)  # a copy of the layer must not write into the same memory
        self.keys, self.values = keys, values
        self.length = 0  # tokens that the layer holds
        self.views = ref(keys), ref(values)  # weak: these views must stay the layer's alone

    def fits(self, layer: DynamicLayer, length: int) -> bool:
        """Return whether the layer still holds its views, or a prefix of them, and `length` tokens fit."""
        return (
            self.owner() is layer
            and length <= self.keys.shape[2]
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
            and (layer.keys is self.views[0]() or is_free_behind(layer.keys, self.keys))
            and (layer.values is self.views[1]() or is_free_behind(layer.values, self.values))
        )

    def commit(self, length: int) -> tuple[Tensor, Tensor]:
        """Let the layer hold `length` more tokens, which have been written; return (keys, values), [B, T, heads, D]."""
        layer = self.owner()
        assert layer is not None
        total = self.length + length
        layer.keys, layer.values = self.keys.narrow(2, 0, total), self.values.narrow(2, 0, total)
        self.views = ref(layer.keys), ref(layer.values)
        return layer.keys.transpose(1, 2), layer.values.transpose(1, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled layer has no buffers until it grows


def is_free_behind(part: Tensor | None, whole: Tensor) -> bool:
    """Return whether part is a prefix of whole [B, heads, T, D], and no other tensor views the tokens after it.

    True for a cache that was cropped, unless the tensors it held before, or slices of them, are still alive.
    """
    return (
        part is not None
        and part.data_ptr() == whole.data_ptr()
        and part.dtype == whole.dtype
        and part.stride() == whole.stride()
        and part.shape[:2] == whole.shape[:2]
        and part.shape[3] == whole.shape[3]
        and tensors_in(whole) == 2
    )


def tensors_in(x: Tensor) -> int | None:
    """Count the tensors that share the memory of x; None where this torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count and count(x.untyped_storage()._cdata) - 1  # less the storage object made here


def static_layer(cache: Any, index: int, like: Tensor, batch: int, heads: int, size: int) -> StaticLayer | None:
    """Return the cache's layer [batch, heads, T, size] if it is a StaticLayer with the standard update.

    It counts its tokens in a tensor, so that a captured step writes to the right slot at each replay.
    """
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update or torch.compiler.is_compiling():
        return None
    layer = cache.layers[index] if index < len(cache.layers) and not cache.offloading else None
    if type(layer) is not StaticLayer or not isinstance(getattr(layer, "cumulative_length", None), Tensor):
        return None
    if not layer.is_initialized:
        none = like.new_empty((batch, heads, 0, size))
        layer.lazy_initialization(none, none)
    keys, values = layer.keys, layer.values
    if keys is None or values is None:
        return None
    shape = (batch, heads, keys.shape[2], size)
    alike = keys.shape == shape == values.shape and keys.dtype == like.dtype == values.dtype
    return layer if alike and keys.device == like.device else None


def needs_grad(cache: Any) -> bool:
    """Return whether a backward may reach the cache's contents, as for learned prefixes."""
    if cache is None or not torch.is_grad_enabled():
        return False
    held = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return any(isinstance(x, Tensor) and x.requires_grad for x in held)


def append(cache: Any, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append keys and values [B, S, heads, D] to a cache's layer; return all of them as [B, T, heads, D]."""
    grown = reserve(cache, index, k, *k.shape)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # the cache keeps [B, heads, S, D]
    if grown is None:
        k, v = cache.update(k, v, index)
        return k.transpose(1, 2), v.transpose(1, 2)
    new = grown.length + k.shape[2]
    grown.keys[:, :, grown.length : new] = k
    grown.values[:, :, grown.length : new] = v
    return grown.commit(k.shape[2])


def reserve(
    cache: Any, index: int, like: Tensor, batch: int, length: int, heads: int, size: int
) -> GrowableCache | None:
    """Return buffers with room for `length` more tokens; None where only the cache's own update applies.

    It does for every layer but a DynamicLayer with the standard update. `like` has the dtype of the keys.
    """
    if (
        not isinstance(cache, Cache)
        or type(cache).update is not Cache.update
        or cache.offloading
        or index >= len(cache.layers)
        or torch.compiler.is_compiling()
    ):
        return None
    layer = cache.layers[index]
    if type(layer) is not DynamicLayer:
        return None
    keys, values = (layer.keys, layer.values) if layer.is_initialized else (None, None)
    old = 0 if keys is None or keys.numel() == 0 else keys.shape[2]
    if keys is not None and old:
        shape = keys.shape
        if shape[0] != batch or shape[1] != heads or shape[3] != size or keys.dtype != like.dtype:
            return None  # update raises the error
    grown: GrowableCache | None = layer.__dict__.get(GROWABLE)
    if not old or grown is None or not grown.fits(layer, old + length):
        vars(layer)[GROWABLE] = grown = None  # frees buffers that the layer no longer uses
        if keys is None:
            layer.lazy_initialization(like, like)
        capacity = old + length + max(STEP, (old + length) // GROWTH)
        new_keys, new_values = (like.new_empty((batch, heads, capacity, size)) for _ in range(2))
        if keys is not None and values is not None and old:
            new_keys[:, :, :old], new_values[:, :, :old] = keys, values
        grown = vars(layer)[GROWABLE] = GrowableCache(layer, new_keys, new_values)
    grown.length = old
    return grown
