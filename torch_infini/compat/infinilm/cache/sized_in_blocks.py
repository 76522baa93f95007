"""PagedKVCacheConfig as scripts written for InfiniLM call it: the first argument is the number of blocks.

torch_infini.compat gives it to scripts instead of the class of cache.py, whose first argument is bytes.
"""

from __future__ import annotations

from . import cache


class PagedKVCacheConfig(cache.PagedKVCacheConfig):
    """A cache of blocks.

    Args:
        num_blocks: The number of blocks; exactly one of this and max_kv_memory_bytes must be given.
        block_size: Tokens per block.
        max_kv_memory_bytes: Memory for keys and values of all layers, which as many blocks as fit use.

    Raises:
        ValueError: As the base class.
    """

    def __init__(
        self, num_blocks: int | None = None, block_size: int = 16, *, max_kv_memory_bytes: int | None = None
    ) -> None:
        super().__init__(max_kv_memory_bytes, block_size, num_blocks=num_blocks)
