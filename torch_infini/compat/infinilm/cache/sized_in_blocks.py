"""PagedKVCacheConfig as scripts written for InfiniLM call it: the first argument is a number of blocks.

torch_infini.compat gives it to scripts in place of the class of cache.py, whose first argument is bytes.
"""

from __future__ import annotations

from . import cache


class PagedKVCacheConfig(cache.PagedKVCacheConfig):
    """A cache of blocks.

    Args:
        num_blocks: Blocks; exactly one of this and max_kv_memory_bytes is given.
        block_size: Tokens in a block.
        max_kv_memory_bytes: For keys and values of all layers; as many blocks as fit.

    Raises:
        ValueError: As the base class.
    """

    def __init__(
        self, num_blocks: int | None = None, block_size: int = 16, *, max_kv_memory_bytes: int | None = None
    ) -> None:
        super().__init__(max_kv_memory_bytes, block_size, num_blocks=num_blocks)
