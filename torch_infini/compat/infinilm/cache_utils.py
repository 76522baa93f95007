"""DynamicCache and StaticCache: keys and values of models written in Python, on infinicore.nn or torch.

They have transformers' methods. InferEngine has its own cache and does not use them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..infinicore import Tensor, empty

_FIRST = 64  # tokens that a growing cache has memory for at first


class Cache:
    """Keys and values by layer. Each layer's are stored in one tensor that new tokens are copied into; results are
    views.

    Args:
        config: The model's config. If it has num_key_value_heads, keys with another number of heads are rejected,
            because their dimensions must be in another order. None: no check.
        max_cache_len: The most tokens of a sequence, for which memory is allocated at once; None: memory grows.
        sequence_dim: The dimension of tokens: 2 for [batch, heads, tokens, head_dim], 1 for [batch, tokens, heads,
            head_dim].

    Raises:
        ValueError: For another sequence_dim, or a length below 1.
    """

    def __init__(self, config: Any = None, max_cache_len: int | None = None, *, sequence_dim: int = 2) -> None:
        if sequence_dim not in (1, 2):
            self._fail("__init__", "sequence_dim must be 1 or 2", sequence_dim)
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            self._fail("__init__", "max_cache_len must be an integer of at least 1", repr(max_cache_len))
        self.max_cache_len, self.sequence_dim = max_cache_len, sequence_dim
        self._heads: int | None = getattr(config, "num_key_value_heads", None)
        self._layers: list[tuple[Any, Any]] = []  # memory for keys and values: contiguous, of equal shape
        self._lengths: list[int] = []

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Append the keys and values of new tokens to a layer.

        Args:
            key_states: [batch, heads, tokens, head_dim] (sequence_dim 2), infinicore's or torch's.
            value_states: As key_states, of any head_dim.
            layer_idx: The layer: an existing one, or the next.
            cache_kwargs: Has no effect: new tokens are appended.

        Returns:
            (keys, values) of all tokens of the layer: views of the cache, which later calls do not move while there is
            room.

        Raises:
            ValueError: For shapes that do not fit the layer, tokens beyond max_cache_len, or an invalid layer.
        """
        new = _wrapped(key_states), _wrapped(value_states)
        if not 0 <= layer_idx <= len(self._layers):
            self._fail("update", f"layer_idx must be at most {len(self._layers)}, the next layer", layer_idx)
        shapes = [list(states.shape) for states in new]
        rule = "key_states and value_states must have four dimensions, alike but for the last"
        if any(len(shape) != 4 for shape in shapes) or shapes[0][:3] != shapes[1][:3]:
            self._fail("update", rule, f"{shapes[0]} and {shapes[1]}")
        if self._heads is not None and shapes[0][3 - self.sequence_dim] != self._heads:
            rule = f"key_states must have the config's {self._heads} heads in dimension {3 - self.sequence_dim}"
            self._fail("update", f"{rule} (sequence_dim= says where tokens are)", shapes[0])
        if layer_idx == len(self._layers):
            first = max(shapes[0][self.sequence_dim], _FIRST) if self.max_cache_len is None else self.max_cache_len
            keys, values = (self._memory(states, first) for states in new)
            self._layers.append((keys, values))
            self._lengths.append(0)
        past, count = self._lengths[layer_idx], shapes[0][self.sequence_dim]
        for kept, shape in zip(self._layers[layer_idx], shapes, strict=True):
            expected = [*kept.shape]
            expected[self.sequence_dim] = count
            if shape != expected:
                self._fail("update", f"new keys or values must have shape {expected}, as those before", shape)
        room = self._layers[layer_idx][0].shape[self.sequence_dim]
        if past + count > room:
            if self.max_cache_len is not None:
                self._fail("update", f"a sequence must have at most max_cache_len, {room}, tokens", past + count)
            self._layers[layer_idx] = self._grown(layer_idx, max(2 * room, past + count))
        for kept, states in zip(self._layers[layer_idx], new, strict=True):
            if count:
                kept.narrow(self.sequence_dim, past, count).copy_(states)
        self._lengths[layer_idx] = past + count
        return self[layer_idx]

    def __getitem__(self, layer_idx: int) -> tuple[Any, Any]:
        """Return the keys and values of a layer."""
        keys, values = self._layers[layer_idx]
        length = self._lengths[layer_idx]
        return keys.narrow(self.sequence_dim, 0, length), values.narrow(self.sequence_dim, 0, length)

    def __len__(self) -> int:
        """Return the number of layers that have keys."""
        return len(self._layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer; 0 for one that does not exist yet."""
        return self._lengths[layer_idx] if layer_idx < len(self._lengths) else 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return the most tokens of a sequence; -1: no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens; if it is negative, drop that many at the end."""
        for layer, length in enumerate(self._lengths):
            kept = length + max_length if max_length < 0 else max_length
            self._lengths[layer] = min(max(kept, 0), length)

    def reset(self) -> None:
        """Drop all tokens, but keep the memory."""
        self.crop(0)

    def _memory(self, states: Any, length: int) -> Any:
        """Allocate a tensor for this many tokens, with the kind, dtype and device of the given ones."""
        shape = [*states.shape]
        shape[self.sequence_dim] = length
        if isinstance(states, torch.Tensor):
            return states.new_empty(shape)
        return empty(shape, dtype=states.dtype, device=states.device)

    def _grown(self, layer: int, length: int) -> tuple[Any, Any]:
        past = self._lengths[layer]
        larger = tuple(self._memory(kept, length) for kept in self._layers[layer])
        for new, old in zip(larger, self[layer], strict=True):
            if past:
                new.narrow(self.sequence_dim, 0, past).copy_(old)
        return larger[0], larger[1]

    def _fail(self, function: str, rule: str, got: object) -> None:
        raise ValueError(f"infinilm.cache_utils.{type(self).__name__}.{function}: {rule}, got {got}")


class DynamicCache(Cache):
    """A cache that grows with its sequences; arguments as for Cache."""

    def __init__(self, config: Any = None, *, sequence_dim: int = 2) -> None:
        super().__init__(config, None, sequence_dim=sequence_dim)


class StaticCache(Cache):
    """A cache with memory for max_cache_len tokens, which never moves; arguments as for Cache.

    update returns the existing tokens, not all of the memory.
    """

    def __init__(self, config: Any = None, max_cache_len: int = 0, *, sequence_dim: int = 2) -> None:
        super().__init__(config, max_cache_len, sequence_dim=sequence_dim)


def _wrapped(states: Any) -> Any:
    """Return a tensor of torch or infinicore; a tensor of _infinicore becomes infinicore's."""
    return states if isinstance(states, (torch.Tensor, Tensor)) else Tensor(states)
