"""infinilm.cache: the cache configs of an InferEngine."""

from .cache import UNLIMITED, CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig, without_subclass

__all__ = ["UNLIMITED", "CacheConfig", "PagedKVCacheConfig", "StaticKVCacheConfig", "without_subclass"]
