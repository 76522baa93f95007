"""The cache configs of an InferEngine.

StaticKVCacheConfig reserves memory for each row of a batch; PagedKVCacheConfig has blocks that the caller allocates.
"""

from __future__ import annotations

UNLIMITED = 2**63 - 1


class CacheConfig:
    """The base class of the cache configs.

    Raises:
        TypeError: If it is instantiated itself.
    """

    def __init__(self) -> None:
        if type(self) is CacheConfig:
            raise TypeError(
                "infinilm.CacheConfig: it must be a StaticKVCacheConfig or a PagedKVCacheConfig, got the base class"
            )


class StaticKVCacheConfig(CacheConfig):
    """A cache of rows.

    Args:
        max_batch_size: The number of rows; a batch may have fewer.
        max_cache_len: Tokens per row; 0 or no limit: the model's number of positions.

    Raises:
        ValueError: For a batch size below 1, or a length below 0.
    """

    def __init__(self, max_batch_size: int = 1, max_cache_len: int = UNLIMITED) -> None:
        super().__init__()
        name = "infinilm.StaticKVCacheConfig"
        self._max_batch_size = _integer(name, "max_batch_size", max_batch_size, 1)
        self._max_cache_len = _integer(name, "max_cache_len", max_cache_len, 0)

    def max_batch_size(self) -> int:
        """Rows."""
        return self._max_batch_size

    def max_cache_len(self) -> int:
        """Tokens per row, as given."""
        return self._max_cache_len

    def __repr__(self) -> str:
        limit = "" if self._max_cache_len in (0, UNLIMITED) else f", max_cache_len={self._max_cache_len}"
        return f"StaticKVCacheConfig(max_batch_size={self._max_batch_size}{limit})"


class PagedKVCacheConfig(CacheConfig):
    """A cache of blocks, sized in bytes or in blocks.

    Versions of InfiniLM differ in the meaning of the first argument. Here it is bytes, and the number of blocks is
    given by name; scripts that run through torch_infini.compat get the class of sized_in_blocks.py, where it is the
    number of blocks. The engine rejects fewer bytes than one block needs, so that a number of blocks passed as bytes is
    noticed.

    Args:
        max_kv_memory_bytes: Memory for keys and values of all layers, which as many blocks as fit use.
        block_size: Tokens per block.
        num_blocks: The number of blocks; exactly one of the two must be given.

    Raises:
        ValueError: For numbers below 1, or if both or none of the two are given.
    """

    def __init__(
        self, max_kv_memory_bytes: int | None = None, block_size: int = 16, *, num_blocks: int | None = None
    ) -> None:
        super().__init__()
        name = "infinilm.PagedKVCacheConfig"
        if (max_kv_memory_bytes is None) == (num_blocks is None):
            got = "none" if num_blocks is None else "both"
            raise ValueError(f"{name}: one of max_kv_memory_bytes and num_blocks must be given, got {got}")
        self._bytes = None if num_blocks is not None else _integer(name, "max_kv_memory_bytes", max_kv_memory_bytes, 1)
        self._blocks = None if num_blocks is None else _integer(name, "num_blocks", num_blocks, 1)
        self._block_size = _integer(name, "block_size", block_size, 1)

    def max_kv_memory_bytes(self) -> int | None:
        """The memory in bytes; None if the number of blocks was given."""
        return self._bytes

    def num_blocks(self) -> int | None:
        """The number of blocks; None if memory was given."""
        return self._blocks

    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    def __repr__(self) -> str:
        size = f"num_blocks={self._blocks}" if self._bytes is None else f"max_kv_memory_bytes={self._bytes}"
        return f"PagedKVCacheConfig({size}, block_size={self._block_size})"


def without_subclass(config: CacheConfig) -> CacheConfig:
    """Return an equal config of a class of this file: other processes cannot import a caller's class."""
    if isinstance(config, StaticKVCacheConfig):
        return StaticKVCacheConfig(config.max_batch_size(), config.max_cache_len())
    if isinstance(config, PagedKVCacheConfig):
        blocks = config.num_blocks()
        size = config.max_kv_memory_bytes() if blocks is None else None
        return PagedKVCacheConfig(size, config.block_size(), num_blocks=blocks)
    return config


def _integer(where: str, name: str, value: int | None, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {name} must be an integer of at least {least}, got {value!r}")
    return value
