"""What InfiniLM's compiled extension `_infinilm` has, under the same names.

The classes are plain Python: callers may subclass them, with other classes too, and set attributes before __init__.
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
