"""The names of InfiniLM's compiled extension `_infinilm`.

The classes are plain Python: callers may subclass them, together with other classes, and set attributes before
__init__.
"""

from ..cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from ..config import Config, LlamaConfig
from ..distributed import DistConfig
from ..hooks import HookRegistry
from ..inference import InferEngine

__all__ = [
    "CacheConfig",
    "Config",
    "DistConfig",
    "HookRegistry",
    "InferEngine",
    "LlamaConfig",
    "PagedKVCacheConfig",
    "StaticKVCacheConfig",
]
